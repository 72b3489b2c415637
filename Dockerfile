# Two images:
#
#   nft   (the default) the program and nothing else. It writes nf_tables, and takes kube-proxy's rules away, without any other program
#   full  besides, in a Debian: nft, iptables of both variants, ipset, ipvsadm and conntrack, to look at a node with, and to write with
#         where only iptables works (docs/IPTABLES.md)
#
#   docker build -t verdict:dev .
#   docker build -t verdict:dev-full --target full .
#   docker buildx build --platform linux/amd64,linux/arm64 -t verdict:dev .

# The build runs on the machine's own architecture, whatever it is that it builds for.
FROM --platform=$BUILDPLATFORM docker.io/library/golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETARCH
RUN CGO_ENABLED=0 GOOS=linux GOARCH=$TARGETARCH go build -trimpath -ldflags "-s -w" -o /verdict ./cmd/verdict

FROM docker.io/library/debian:stable-slim AS full
RUN apt-get update && apt-get install -y --no-install-recommends nftables iptables ipset ipvsadm conntrack iproute2 \
	&& rm -rf /var/lib/apt/lists/*
COPY --from=build /verdict /usr/local/bin/verdict
ARG VERSION=dev
LABEL org.opencontainers.image.title="Verdict" \
	org.opencontainers.image.description="A Kubernetes Service proxy on nftables verdict maps" \
	org.opencontainers.image.source="https://github.com/verdict-proxy/verdict" \
	org.opencontainers.image.licenses="Apache-2.0" \
	org.opencontainers.image.version="$VERSION"
# Commands that only read manifests need no rights. "verdict run" does, and Kubernetes gives capabilities to user 0 alone: the
# DaemonSet says runAsUser: 0.
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/verdict"]

FROM scratch AS nft
COPY --from=build /verdict /usr/local/bin/verdict
ARG VERSION=dev
LABEL org.opencontainers.image.title="Verdict" \
	org.opencontainers.image.description="A Kubernetes Service proxy on nftables verdict maps" \
	org.opencontainers.image.source="https://github.com/verdict-proxy/verdict" \
	org.opencontainers.image.licenses="Apache-2.0" \
	org.opencontainers.image.version="$VERSION"
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/verdict"]
