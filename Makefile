# The two commands of the README are `make demo` and `make test`. Both install what they need on a Debian machine with Go.

GO    ?= go
BIN   ?= bin
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/verdict

.PHONY: demo build test lint unit race fuzz bench guests tools clean

demo: build ## real connections, balanced by nftables, in namespaces of its own
	$(BIN)/verdict demo

build:
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/verdict ./cmd/verdict

test: tools build lint race fuzz bench-once ## everything CI runs

# gcc is for the race detector; nft, ip and conntrack are what the tests compare and look with.
tools:
	./internal/guest/install nftables iproute2 gcc libc6-dev
	./internal/guest/fetch nft $(CACHE)/nft

lint:
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

unit:
	VERDICT_NFT_DIR=$(CACHE)/nft $(GO) test ./...

race:
	VERDICT_NFT_DIR=$(CACHE)/nft $(GO) test -race ./...

clean:
	rm -rf $(BIN)
