package flows

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// collectorPatience is how long the collector may take for a batch. It is asked collectorTries times, after pauses of
// which the first is collectorPause and each other twice as long as the last.
const (
	collectorPatience = 10 * time.Second
	collectorTries    = 5
	collectorPause    = time.Second
)

// collector sends records as logs to an OpenTelemetry collector, by OTLP over HTTP. Of OpenTelemetry it links only the
// messages: its exporters link gRPC, which takes 3 MB of the binary and 4 MiB of memory on every node.
type collector struct {
	url      string
	resource *resource.Resource
	client   http.Client
	pause    time.Duration
}

// newCollector returns the collector at a URL. Without a path, it is that of logs.
func newCollector(url, node string) *collector {
	if base := strings.TrimSuffix(url, "/"); strings.Count(base, "/") == 2 {
		url = base + "/v1/logs"
	}
	var attributes attributes
	attributes.text("service.name", "verdict")
	attributes.text("k8s.node.name", node)
	return &collector{url: url, resource: &resource.Resource{Attributes: attributes}, pause: collectorPause,
		client: http.Client{Timeout: collectorPatience}}
}

func (c *collector) close() error {
	c.client.CloseIdleConnections()
	return nil
}

// write sends a batch, and again if the collector cannot take it now.
func (c *collector) write(ctx context.Context, batch []Record) (lost int, err error) {
	records := make([]*logs.LogRecord, len(batch))
	for i := range batch {
		records[i] = logOf(&batch[i])
	}
	// The request of the service has the same fields as LogsData.
	text, err := proto.Marshal(&logs.LogsData{ResourceLogs: []*logs.ResourceLogs{{Resource: c.resource,
		ScopeLogs: []*logs.ScopeLogs{{Scope: &common.InstrumentationScope{Name: "verdict"}, LogRecords: records}}}}})
	if err != nil {
		return len(batch), err
	}
	var body bytes.Buffer
	zip := gzip.NewWriter(&body)
	_, _ = zip.Write(text) // a buffer takes all
	_ = zip.Close()
	pause := c.pause
	for try := 1; ; try++ {
		again, rejected, err := c.post(ctx, body.Bytes())
		if err == nil || rejected > 0 {
			return rejected, err
		}
		if !again || try == collectorTries {
			return len(batch), err
		}
		if clock.Pause(ctx, pause); ctx.Err() != nil {
			return len(batch), err
		}
		pause *= 2
	}
}

// post sends a request. Again says that it may help to send it again, and rejected how many records the collector did
// not take of a request that it took.
func (c *collector) post(ctx context.Context, body []byte) (again bool, rejected int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return false, 0, err
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	req.Header.Set("Content-Encoding", "gzip")
	resp, err := c.client.Do(req)
	if err != nil {
		return true, 0, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode/100 == 2 {
		if rejected, why := partialSuccess(answer); rejected > 0 && err == nil {
			return false, rejected, fmt.Errorf("%s rejected %d records: %.200q", c.url, rejected, why)
		}
		return false, 0, nil
	}
	switch resp.StatusCode { // those that OTLP has the sender try again after
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		again = true
	}
	return again, 0, fmt.Errorf("%s: %s", c.url, resp.Status)
}

// partialSuccess reads an ExportLogsServiceResponse, whose package links gRPC: how many records were rejected, and why.
func partialSuccess(answer []byte) (rejected int, why string) {
	const partial, count, message = 1, 1, 2
	eachField(answer, func(n protowire.Number, text []byte, _ uint64) {
		if n == partial {
			eachField(text, func(n protowire.Number, text []byte, value uint64) {
				switch n {
				case count:
					rejected = int(min(value, maxWaiting))
				case message:
					why = string(text)
				}
			})
		}
	})
	return rejected, why
}

// eachField calls do for the fields of a message: those with bytes have a text, varints a value.
func eachField(message []byte, do func(n protowire.Number, text []byte, value uint64)) {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return
		}
		rest := message[size:]
		length := protowire.ConsumeFieldValue(n, kind, rest)
		if length < 0 {
			return
		}
		switch kind {
		case protowire.BytesType:
			text, _ := protowire.ConsumeBytes(rest)
			do(n, text, 0)
		case protowire.VarintType:
			value, _ := protowire.ConsumeVarint(rest)
			do(n, nil, value)
		}
		message = rest[length:]
	}
}

// attributes are those of a log record, by the names of OpenTelemetry's semantic conventions where these have one.
type attributes []*common.KeyValue

// text adds an attribute, but for an empty one.
func (a *attributes) text(key, value string) {
	if value != "" {
		*a = append(*a, &common.KeyValue{Key: key,
			Value: &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: value}}})
	}
}

func (a *attributes) number(key string, value uint64) {
	*a = append(*a, &common.KeyValue{Key: key,
		Value: &common.AnyValue{Value: &common.AnyValue_IntValue{IntValue: int64(value)}}})
}

// peer adds what is known of a side: source or destination.
func (a *attributes) peer(side string, p *Peer) {
	switch {
	case p.Prefix.IsValid():
		a.text(side+".address", p.Prefix.String())
	case p.Addr.IsValid():
		a.text(side+".address", p.Addr.Addr().String())
		a.number(side+".port", uint64(p.Addr.Port()))
	}
	namespace, pod, _ := strings.Cut(p.Pod, "/")
	_, workload, _ := strings.Cut(p.Workload, "/")
	a.text(side+".k8s.namespace.name", namespace)
	a.text(side+".k8s.pod.name", pod)
	a.text(side+".k8s.workload.name", workload)
	a.text(side+".k8s.node.name", p.Node)
	a.text(side+".cloud.availability_zone", p.Zone)
}

// logOf is a record as OpenTelemetry has it.
func logOf(r *Record) *logs.LogRecord {
	var a attributes
	family := "ipv4"
	if r.Frontend.Addr().Is6() {
		family = "ipv6"
	}
	namespace, service, _ := strings.Cut(r.Service, "/")
	a.text("network.transport", strings.ToLower(r.Protocol))
	a.text("network.type", family)
	a.text("server.address", r.Frontend.Addr().String())
	a.number("server.port", uint64(r.Frontend.Port()))
	a.text("k8s.namespace.name", namespace)
	a.text("k8s.service.name", service)
	a.text("k8s.service.port.name", r.Port)
	a.peer("source", &r.Client)
	a.peer("destination", &r.Endpoint)
	a.number("verdict.flow.sent.bytes", r.Sent.Bytes)
	a.number("verdict.flow.sent.packets", r.Sent.Packets)
	a.number("verdict.flow.received.bytes", r.Received.Bytes)
	a.number("verdict.flow.received.packets", r.Received.Packets)
	a.number("verdict.flow.duration_ms", uint64(r.Seconds*1000))
	a.text("verdict.flow.end", string(r.End))
	a.text("verdict.flow.reason", r.Reason)
	a.number("verdict.flow.weight", uint64(r.Weight))
	if !r.Since.IsZero() {
		a.text("verdict.flow.since", r.Since.UTC().Format(time.RFC3339Nano))
	}
	l := &logs.LogRecord{TimeUnixNano: uint64(r.Time.UnixNano()), EventName: "verdict.flow", Attributes: a,
		SeverityNumber: logs.SeverityNumber_SEVERITY_NUMBER_INFO,
		Body:           &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: string(r.End)}}}
	if r.Failure() {
		l.SeverityNumber = logs.SeverityNumber_SEVERITY_NUMBER_WARN
	}
	return l
}
