{{- define "verdict.labels" -}}
app.kubernetes.io/name: verdict
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The host of an address with or without a port, without brackets. It is empty if that means every address. */ -}}
{{- define "verdict.hostOf" -}}
{{- $host := . | toString }}
{{- if regexMatch `^\[[^]]*\]:[0-9]+$` $host }}
{{- $host = regexReplaceAll `^\[([^]]*)\]:[0-9]+$` $host "${1}" }}
{{- else if regexMatch `^[^:]*:[0-9]+$` $host }}
{{- $host = regexReplaceAll `:[0-9]+$` $host "" }}
{{- end }}
{{- if not (has $host (list "" "0.0.0.0" "::")) }}{{ $host }}{{ end }}
{{- end }}

{{- /* The port of .address, or .otherwise if it has none. In fd00::1, the last group is no port. */ -}}
{{- define "verdict.portOf" -}}
{{- if regexMatch `^(\[[^]]*\]|[^:]*):[0-9]+$` .address }}
{{- regexFind `[0-9]+$` .address }}
{{- else }}
{{- .otherwise }}
{{- end }}
{{- end }}

{{- /* What the configuration says of a server's address, as far as the chart knows it: healthzBindAddress or
metricsBindAddress. */ -}}
{{- define "verdict.healthAddress" -}}
{{- if not .Values.existingConfigMap }}{{ .Values.config.healthzBindAddress | default "" }}{{ end }}
{{- end }}
{{- define "verdict.metricsAddress" -}}
{{- if not .Values.existingConfigMap }}{{ .Values.config.metricsBindAddress | default "127.0.0.1" }}{{ end }}
{{- end }}

{{- /* Not empty if there is a collector: the controller of Gateways is part of its process. */ -}}
{{- define "verdict.collects" -}}
{{- if or .Values.collector.enabled .Values.gateway.enabled }}yes{{ end }}
{{- end }}

{{- define "verdict.collectorLabels" -}}
app.kubernetes.io/name: verdict-collector
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The port of the probes. */ -}}
{{- define "verdict.healthPort" -}}
{{- $address := include "verdict.healthAddress" . }}
{{- .Values.healthPort | default (include "verdict.portOf" (dict "address" $address "otherwise" 10256)) }}
{{- end }}

{{- /* The port of the metrics. */ -}}
{{- define "verdict.metricsPort" -}}
{{- $address := include "verdict.metricsAddress" . }}
{{- .Values.metricsPort | default (include "verdict.portOf" (dict "address" $address "otherwise" 10249)) }}
{{- end }}

{{- /* Where a probe asks: the kubelet takes the pod's address if no host is named. */ -}}
{{- define "verdict.probe" -}}
{{- with include "verdict.hostOf" (include "verdict.healthAddress" .) }}host: {{ . | quote }}, {{ end -}}
port: {{ include "verdict.healthPort" . }}
{{- end }}

{{- define "verdict.image" -}}
{{- $image := .Values.image }}
{{- $name := required "image.repository: no image is published yet. Build one (docs/INSTALL.md, \"The image\"), and say where it is, such as registry.example/verdict" $image.repository }}
{{- if $image.digest }}
{{- $name }}@{{ $image.digest }}
{{- else }}
{{- $tag := $image.tag | default .Chart.AppVersion }}
{{- if and (not $image.tag) (eq $tag "dev") }}
{{- fail "image.tag: this chart is of no release, so it knows no tag: give the image's tag or digest" }}
{{- end }}
{{- $name }}:{{ $tag }}
{{- end }}
{{- end }}

{{- /* The pods' ranges, joined by a comma: a list, or a text, of at most one range of each family. */ -}}
{{- define "verdict.clusterCIDR" -}}
{{- $given := .Values.clusterCIDR | default .Values.config.clusterCIDR }}
{{- $ranges := list }}
{{- $families := list }}
{{- range (kindIs "slice" $given | ternary $given (splitList "," ($given | default "" | toString))) }}
{{- $range := . | toString | trim }}
{{- if $range }}
{{- $family := "" }}
{{- if regexMatch `^[0-9]{1,3}([.][0-9]{1,3}){3}/([0-9]|[12][0-9]|3[0-2])$` $range }}
{{- $family = "IPv4" }}
{{- else if regexMatch `^[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*/([0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])$` $range }}
{{- $family = "IPv6" }}
{{- else }}
{{- fail (printf "clusterCIDR: %q is not a range of addresses such as 10.244.0.0/16 or fd00:10:244::/48" $range) }}
{{- end }}
{{- if has $family $families }}
{{- fail (printf "clusterCIDR: %q is a second range of %s: give at most one range of each family" $range $family) }}
{{- end }}
{{- $families = append $families $family }}
{{- $ranges = append $ranges $range }}
{{- end }}
{{- end }}
{{- join "," $ranges }}
{{- end }}
