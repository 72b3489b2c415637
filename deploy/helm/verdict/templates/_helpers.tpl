{{- define "verdict.labels" -}}
app.kubernetes.io/name: verdict
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- /* The port of the probes: that of the configuration's healthzBindAddress, as far as the chart knows it. */ -}}
{{- define "verdict.healthPort" -}}
{{- $address := "" }}
{{- if not .Values.existingConfigMap }}
{{- $address = .Values.config.healthzBindAddress | default "" }}
{{- end }}
{{- .Values.healthPort | default (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $address)) | default 10256 }}
{{- end }}
{{- define "verdict.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
