# The two commands of the README are `make demo` and `make test`. Both install what they need on a Debian machine with Go.

GO       ?= go
BIN      ?= bin
CACHE    ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/verdict
FUZZTIME ?= 30s
export VERDICT_CACHE ?= $(CACHE)
# The tests look at what they write with these, besides the system's own nft.
export VERDICT_NFT_DIR ?= $(CACHE)/nft

# The tests of IPVS fail where the kernel has none, unless they are told so by name. They run in guests: make matrix.
export VERDICT_IPVS ?= $(if $(wildcard /proc/net/ip_vs),,none)

.PHONY: help demo build check goldens test tools lint race unit once conformance conformance-case conformance-slice conformance-ipvs bench bench-quick bench-docs bench-go bench-ipvs fuzz matrix soak cross image cluster clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: build ## real connections, balanced by nftables, in namespaces that vanish with it
	@$(BIN)/verdict demo

build: ## bin/verdict, a static binary
	@CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/verdict ./cmd/verdict

# The packages whose tests need no network namespace, no root and no nft.
CHECKED = ./sync/dataplane ./sync/reconcile ./sync/snapshot ./nft ./internal/arch ./internal/cgroup ./internal/config \
	./internal/health ./internal/logging ./internal/sysctl ./internal/testkit

check: ## the inner loop: gofmt, go vet, whether everything compiles, and the tests that need neither root nor nft
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	$(GO) build ./...
	$(GO) vet ./...
	$(GO) test -short $(CHECKED)

# The tests that compare with goldens, in all packages that have the flag -update.
GOLDEN_TESTS = TestGoldens|TestRender|TestExplain|TestBroken|TestDocumentation|TestNames|TestTable|TestTables|TestPlots
goldens: ## write every golden anew: read the difference before you commit it
	@for package in $$(git grep -l 'flag.Bool("update"' -- '*_test.go' | xargs -n1 dirname); do \
		(cd $$package && $(GO) test -count=1 -run '^($(GOLDEN_TESTS))$$' . -update) || exit; done

test: tools build lint race once conformance-slice ## everything CI runs

# gcc is for the race detector; the tests read and write rulesets with nft, which has protocols' names from netbase, and set up
# odd routes with ip; iptables and ipset are what kube-proxy writes with.
tools:
	@internal/guest/install nftables netbase iproute2 iptables ipset gcc libc6-dev
	@internal/guest/fetch nft $(VERDICT_NFT_DIR)

lint: ## gofmt, go vet, staticcheck, and whether it compiles for arm64
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	$(GO) vet -tags peers ./...
	$(GO) tool staticcheck -tags peers ./...
	check=$$($(GO) tool -n staticcheck) && \
	for module in conformance deploy/test; do (cd $$module && $(GO) vet -tags peers ./... && $$check -tags peers ./...) || exit; done
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build -o /dev/null ./cmd/verdict

race: ## all tests, with the race detector
	$(GO) test -race -timeout 30m ./...
	cd conformance && $(GO) test -race ./...
	cd deploy/test && $(GO) test ./...

unit: tools ## all tests, without it
	$(GO) test ./...
	cd conformance && $(GO) test ./...
	cd deploy/test && $(GO) test ./...

once: ## each benchmark once, and the test of memory, which the race detector would blur
	$(GO) test -run XXX -bench . -benchtime 1x ./nft/... ./sync/... ./internal/benchmark
	$(GO) test -run Memory -v ./sync/watch

# The control plane and kube-proxy are built from their modules the first time, which takes some minutes.
CONFORMANCE = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/conformance ./cmd/conformance && $(BIN)/conformance

conformance: tools ## every case of the conformance suite: Verdict, and kube-proxy in both of its modes
	$(CONFORMANCE) --proxy verdict --proxy kube-proxy-nftables --proxy kube-proxy-iptables --report $(BIN)/conformance-report

CASE ?= ^$$
conformance-case: tools ## the cases whose names hold the regular expression CASE, with every failure at once
	$(CONFORMANCE) --proxy verdict --v --run '$(CASE)'

# The second run shows that the suite notices a wrong proxy: status 1 says that cases failed, and nothing else did.
conformance-slice: tools build ## some cases of every theme: Verdict and kube-proxy, and a proxy that must fail
	$(CONFORMANCE) --slice --proxy verdict --proxy kube-proxy-nftables --report $(BIN)/conformance-report
	$(BIN)/conformance --slice --theme internal-traffic-policy --proxy conformance/testdata/deaf.yaml > $(BIN)/conformance-deaf.txt 2>&1; test $$? = 1

BENCH = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/benchmark ./cmd/benchmark && $(BIN)/benchmark

bench: tools ## Verdict and kube-proxy beside each other in large clusters: four hours at most, and goes on where it was broken off
	$(BENCH)

bench-quick: tools ## a first picture of it in five minutes, after what has to be built
	$(BENCH) --quick --fresh

bench-docs: ## tables and pictures of the last make bench into docs/ and the README
	$(BENCH) --render --docs

bench-go: ## the whole line to the kernel, and the kernel alone beside it, without a cluster
	$(GO) test -run XXX -bench . -benchtime 10x ./nft/kernel ./internal/benchmark

fuzz: ## let the fuzz tests look for new cases, FUZZTIME each
	$(GO) test -run XXX -fuzz FuzzManifest -fuzztime $(FUZZTIME) ./sync/watch
	$(GO) test -run XXX -fuzz FuzzLoad -fuzztime $(FUZZTIME) ./internal/config
	$(GO) test -run XXX -fuzz FuzzIncrementalEqualsFull -fuzztime $(FUZZTIME) ./sync/dataplane
	$(GO) test -run XXX -fuzz FuzzPlanEqualsFull -fuzztime $(FUZZTIME) ./nft
	$(GO) test -run XXX -fuzz FuzzRestartAndRepair -fuzztime $(FUZZTIME) ./nft
	$(GO) test -run XXX -fuzz FuzzPlanEqualsFull -fuzztime $(FUZZTIME) ./nft/iptshim

matrix: ## the tests of the kernel, of taking over, of IPVS and of iptables, on Linux 5.10, 6.1, 6.12 and 7.2 under QEMU: half an hour
	internal/guest/matrix ./nft/kernel
	internal/guest/matrix ./internal/takeover -test.run=IPVS
	internal/guest/matrix ./ipvsplugin
	internal/guest/matrix ./cmd/verdict -test.run='IPVS|ClockJumps|ConntrackFull|MemoryLimit'
	internal/guest/matrix -i ./nft/iptshim -test.skip=Goldens
	internal/guest/matrix -i ./nft/iptshim/xtables

# In a guest, where IPVS is, everything takes several times as long.
IPVS_KERNELS  ?= 6.1 6.12
IPVS_SUITE    ?= --proxy verdict-ipvs --stories 3
conformance-ipvs: ## every case of the conformance suite with IPVS, on Linux 6.1 and 6.12 under QEMU
	@for kernel in $(IPVS_KERNELS); do internal/guest/conformance $$kernel --slow 5 $(IPVS_SUITE) || exit; done

bench-ipvs: ## 10,000 Services through IPVS, on Linux 6.12 under QEMU
	internal/guest/bench 6.12 10000

soak: tools ## the long random walk, leaks over 10,000 syncs, and 1,000 kills: about half an hour
	$(GO) test ./nft/kernel -run 'TestWalk|TestLeaks' -walk.steps 100000 -walk.syncs 10000 -timeout 60m -v
	$(GO) test ./cmd/verdict -run TestKilled -kills 1000 -timeout 30m -v

cross: ## bin/verdict-linux-amd64 and -arm64
	@for arch in amd64 arm64; do CGO_ENABLED=0 GOARCH=$$arch $(GO) build -trimpath -o $(BIN)/verdict-linux-$$arch ./cmd/verdict || exit; done

IMAGE ?= verdict:dev
image: ## the container image, by buildah or docker
	$$(command -v buildah || command -v docker) build -t $(IMAGE) .

cluster: tools ## deploy/ at a real API server, and rules of iptables beside a real kube-proxy's, which are built first
	cd deploy/test && $(GO) test -tags peers -count=1 -v .
	$(GO) test -tags peers -count=1 -v -run TestKubeProxy ./nft/iptshim

clean:
	rm -rf $(BIN)
