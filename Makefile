# The two commands of the README are `make demo` and `make test`. Both install what they need on a Debian machine with Go.

GO       ?= go
BIN      ?= bin
CACHE    ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/verdict
FUZZTIME ?= 30s
export VERDICT_CACHE ?= $(CACHE)
# The tests list their rulesets with these versions of nft, besides the system's own.
export VERDICT_NFT_DIR ?= $(CACHE)/nft

# The tests of IPVS fail on a kernel without IPVS, unless this variable says so. They run in guests: make matrix.
export VERDICT_IPVS ?= $(if $(wildcard /proc/net/ip_vs),,none)

# No target is a file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: build ## show real connections, balanced by nftables, in temporary namespaces
	@$(BIN)/verdict demo

# The flag has "verdict version" name the commit, whatever GOFLAGS says. Go finds none in a worktree.
build: ## build bin/verdict, a static binary
	@CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=auto -o $(BIN)/verdict ./cmd/verdict

# The packages whose tests need no network namespace, no root and no nft.
CHECKED = ./sync/dataplane ./sync/reconcile ./sync/snapshot ./nft ./internal/arch ./internal/system/cgroup ./internal/proxy/config \
	./internal/proxy/health ./internal/system/logging ./internal/system/sysctl ./internal/system/testkit

check: ## run the inner loop: gofmt, go vet, a build, and the tests that need neither root nor nft
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	$(GO) build ./...
	$(GO) vet ./...
	$(GO) test -short $(CHECKED)

# The tests that compare with goldens, in all packages with the flag -update.
GOLDEN_TESTS = TestGoldens|TestRender|TestExplain|TestBroken|TestDocumentation|TestPictures|TestNames|TestTable|TestTables|TestPlots
goldens: ## renew every golden: read the difference before you commit it
	@for package in $$(git grep -l 'flag.Bool("update"' -- '*_test.go' | xargs -n1 dirname); do \
		(cd $$package && $(GO) test -count=1 -run '^($(GOLDEN_TESTS))$$' . -update) || exit; done

test: tools build lint race once conformance-slice history-slice ## run everything that CI runs

# The race detector needs gcc. The tests read and write rulesets with nft, which needs netbase for protocol names, and
# set up unusual routes with ip. kube-proxy writes with iptables and ipset.
tools:
	@internal/lab/guest/install nftables netbase iproute2 iptables ipset gcc libc6-dev
	@internal/lab/guest/fetch nft $(VERDICT_NFT_DIR)

lint: ## run gofmt, go vet and staticcheck, and compile for arm64
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	$(GO) vet -tags peers ./...
	$(GO) vet -tags man ./cmd/verdict
	$(GO) tool staticcheck -tags peers ./...
	check=$$($(GO) tool -n staticcheck) && \
	for module in conformance deploy/test deploy/release; do (cd $$module && $(GO) vet -tags peers ./... && $$check -tags peers ./...) || exit; done
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build -o /dev/null ./cmd/verdict

# These packages start no goroutine. The race detector takes minutes there, and has nothing to find that the tests of
# those who call them do not show it. In RACED, the whole line runs, and is asked for its counters meanwhile.
SEQUENTIAL = ./internal/answers/plan ./internal/arch ./internal/proxy/takeover ./internal/system/packets ./nft ./nft/iptshim \
	./nft/kernel ./sync/dataplane
RACED = ^TestSimulation$$

# Likewise in these tests of other packages, of packets, of rules, of a million clients, of random ledgers, and of 200
# nodes with a clock of their own: each package has smaller ones that call the same code from several goroutines.
UNRACED = ^Test(Explain(Live|Ping|Hairpin|Unreachable|Disagrees)|Preflight|GoldensLoad|MillionClients|LedgerNeverLies|NewsAfterAnOutage)$$
UNRACED_IN = ./cmd/verdict ./internal/answers/inspect ./internal/proxy/flows ./internal/proxy/metrics \
	./sync/watch

# lint has vetted the packages.
TEST = $(GO) test -vet=off -timeout 30m

# The halves run side by side, since tests of packets wait more than they compute.
race: ## run all tests, with the race detector where there is concurrency
	@$(MAKE) --no-print-directory -j2 raced unraced

# A program with the race detector sleeps a second when it ends, to see what other goroutines do then. Some hundred times
# the tests wait for a verdict to end.
raced: export GORACE = atexit_sleep_ms=50
raced:
	$(TEST) -race -p 3 -skip '$(UNRACED)' $$($(GO) list ./... | grep -vxF "$$($(GO) list $(SEQUENTIAL))")
	$(TEST) -race -run '$(RACED)' ./nft/kernel
	cd conformance && $(TEST) -race ./...

# Much of it computes and allocates. It takes a quarter less of the processors with a collector that comes less often.
unraced: export GOGC = 400
unraced:
	$(TEST) $(SEQUENTIAL)
	$(TEST) -run '$(UNRACED)' $(UNRACED_IN)
	cd deploy/test && $(TEST) ./...
	cd deploy/release && $(TEST) ./...

unit: tools ## run all tests without the race detector
	$(GO) test ./...
	cd conformance && $(GO) test ./...
	cd deploy/test && $(GO) test ./...
	cd deploy/release && $(GO) test ./...

once: ## run each benchmark once and small, and the test of memory, which the race detector would distort
	$(TEST) -short -run XXX -bench . -benchtime 1x ./nft/... ./sync/... ./internal/lab/benchmark
	$(TEST) -run Memory -v ./sync/watch

# The first run builds the control plane and kube-proxy from their modules, which takes some minutes.
CONFORMANCE = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/conformance ./cmd/conformance && $(BIN)/conformance

conformance: tools ## run the conformance suite: Verdict, and kube-proxy in iptables and nftables mode
	$(CONFORMANCE) --proxy verdict --proxy kube-proxy-nftables --proxy kube-proxy-iptables --report $(BIN)/conformance-report

neighbors: tools ## the same Services beside Docker, ufw, firewalld and Tailscale, whose rules are made first, and beside settings of the kernel
	internal/lab/guest/neighbors
	$(CONFORMANCE) --proxy verdict --proxy kube-proxy-nftables --theme neighbors --report $(BIN)/neighbors-report

CASE ?= ^$$
conformance-case: tools ## the cases whose names hold the regular expression CASE, with every failure at once
	$(CONFORMANCE) --proxy verdict --v --run '$(CASE)'

# The second run shows that the suite detects a wrong proxy: status 1 means that cases failed, and nothing else.
conformance-slice: tools build ## run some cases of every theme: Verdict, also as kube-proxy, kube-proxy, and a proxy that must fail
	$(CONFORMANCE) --slice --proxy verdict --proxy verdict-as-kube-proxy --proxy kube-proxy-nftables --report $(BIN)/conformance-report
	$(BIN)/conformance --slice --theme internal-traffic-policy --proxy conformance/testdata/deaf.yaml > $(BIN)/conformance-deaf.txt 2>&1; test $$? = 1

BENCH = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/benchmark ./cmd/benchmark && $(BIN)/benchmark

bench: tools ## compare Verdict and kube-proxy in large clusters: four hours at most; continues after an interruption
	$(BENCH)

bench-quick: tools ## the same in five minutes, plus the time to build, for a first picture
	$(BENCH) --quick --fresh

BESIDE_CILIUM = --out $(BIN)/bench-cilium --size 10000x10 \
	--proxy verdict-nftables --proxy kube-proxy-nftables --proxy cilium --proxy cilium-socket

bench-cilium: tools ## compare Verdict, kube-proxy and Cilium at 10,000 x 10: an hour
	$(BENCH) $(BESIDE_CILIUM)
	$(BIN)/benchmark $(BESIDE_CILIUM) --paths

bench-packets: tools ## only what packets cost there, by turns: thirteen minutes
	$(BENCH) $(BESIDE_CILIUM) --paths

bench-docs: ## write tables and pictures of the last make bench and make bench-cilium into docs/ and the README
	for results in $(BIN)/bench $(BIN)/bench-cilium; do \
		test ! -e $$results/results.json || { $(BENCH) --render --docs --out $$results || exit 1; }; done

bench-outages: tools ## compare what clients see when endpoints die: some hours; continues after an interruption
	$(BENCH) outages

bench-compare: tools ## run "verdict compare" beside real kube-proxies with up to 30,000 Services: most of an hour
	$(BENCH) compare

HISTORY = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/history ./cmd/history && $(BIN)/history

history: tools ## record how stale Verdict and kube-proxy are: an hour; continues after an interruption
	$(HISTORY)

# The second and third runs show that the checker catches wrong proxies: status 1 means a violation, and nothing else.
HISTORY_SLICE = --repeat 1 --length 8s --bound 4s --explain --fresh
history-slice: tools build ## some short histories: Verdict, and two proxies that must fail
	$(HISTORY) $(HISTORY_SLICE) --proxy verdict --run '^(churn|affinity-killed)$$' --out $(BIN)/history-slice
	$(BIN)/history $(HISTORY_SLICE) --proxy conformance/testdata/late.yaml --run '^churn$$' \
		--out $(BIN)/history-late > $(BIN)/history-late.txt 2>&1; test $$? = 1 && grep -q '^late: ' $(BIN)/history-late.txt
	$(BIN)/history $(HISTORY_SLICE) --proxy conformance/testdata/lossy.yaml --run '^churn$$' \
		--out $(BIN)/history-lossy > $(BIN)/history-lossy.txt 2>&1; test $$? = 1 && grep -q '^lost: ' $(BIN)/history-lossy.txt

# The bound is far beyond what a busy machine needs: what it catches never ends. Other violations count at once.
PIECE ?= 1
history-kills: tools build ## record an hour of random histories in which proxies and the API server are killed: PIECE=1, 2, ...
	$(HISTORY) --proxy verdict --run '^(killed|restarted|affinity-killed|api-gone)$$' --length 60s --repeat 11 \
		--bound 3m --explain --seed $(PIECE)000000 --out $(BIN)/history-kills/$(PIECE)

bench-go: ## measure the whole line to the kernel, and the kernel alone, without a cluster
	$(GO) test -run XXX -bench . -benchtime 10x ./nft/kernel ./internal/lab/benchmark

browser: ## look at the dashboard with chromium, as Debian has it
	@internal/lab/guest/install chromium fonts-dejavu-core
	cd conformance && $(GO) test -tags browser ./browser

fuzz: ## run the fuzz tests, FUZZTIME each, to find new cases
	$(GO) test -run XXX -fuzz FuzzManifest -fuzztime $(FUZZTIME) ./sync/watch
	$(GO) test -run XXX -fuzz FuzzLoad -fuzztime $(FUZZTIME) ./internal/proxy/config
	$(GO) test -run XXX -fuzz FuzzIncrementalEqualsFull -fuzztime $(FUZZTIME) ./sync/dataplane
	$(GO) test -run XXX -fuzz FuzzPlanEqualsFull -fuzztime $(FUZZTIME) ./nft
	$(GO) test -run XXX -fuzz FuzzRestartAndRepair -fuzztime $(FUZZTIME) ./nft
	$(GO) test -run XXX -fuzz FuzzPlanEqualsFull -fuzztime $(FUZZTIME) ./nft/iptshim
	$(GO) test -run XXX -fuzz FuzzReplay -fuzztime $(FUZZTIME) ./nft/kernel
	$(GO) test -run XXX -fuzz FuzzReader -fuzztime $(FUZZTIME) ./internal/proxy/ledger

matrix: ## run the tests of the kernel, takeover, IPVS and iptables on Linux 5.10, 6.1, 6.12 and 7.2 under QEMU: half an hour
	internal/lab/guest/matrix ./nft/kernel
	internal/lab/guest/matrix ./internal/proxy/takeover -test.run=IPVS
	internal/lab/guest/matrix ./internal/proxy/conntrack -test.run=TestReset
	internal/lab/guest/matrix ./internal/system/ipvshandle
	internal/lab/guest/matrix ./ipvsplugin
	internal/lab/guest/matrix ./cmd/verdict -test.run='IPVS|ClockJumps|ConntrackFull|MemoryLimit'
	internal/lab/guest/matrix -i ./nft/iptshim -test.skip=Goldens
	internal/lab/guest/matrix -i ./nft/iptshim/xtables

# IPVS needs a guest, where everything takes several times as long.
IPVS_KERNELS  ?= 6.1 6.12
IPVS_SUITE    ?= --proxy verdict-ipvs --stories 3
conformance-ipvs: ## run the conformance suite with IPVS, on Linux 6.1 and 6.12 under QEMU
	@for kernel in $(IPVS_KERNELS); do internal/lab/guest/conformance $$kernel --slow 5 $(IPVS_SUITE) || exit; done

takeover-ipvs: ## have a real kube-proxy in IPVS mode and Verdict take over from each other, on the same kernels
	@for kernel in $(IPVS_KERNELS); do internal/lab/guest/takeover $$kernel || exit; done

bench-ipvs: ## measure nftables and IPVS with 1,000 and 10,000 Services, on Linux 6.12 under QEMU
	internal/lab/guest/bench 6.12 1000,10000 -scale.rounds 5

soak: tools ## run the long random test, 10,000 syncs to find leaks, 69,000 changes under clients, and 1,000 kills: half an hour
	$(GO) test ./nft/kernel -run 'TestWalk|TestLeaks' -walk.steps 100000 -walk.syncs 10000 -timeout 60m -v
	$(GO) test ./nft/kernel -run 'TestChangesLoseNobody|TestSharesChangeUnderLoad' -changes.all -v
	$(GO) test ./cmd/verdict -run TestKilled -kills 1000 -timeout 30m -v

# A packet's cost, by turns with nodes that route it, and everything of TestClientAddress* at its full size.
client-address: tools ## send 60,000 connections whose address is kept, hold 1,000 while endpoints move, and measure a packet
	$(GO) test ./nft/kernel -run TestClientAddress -keep.connections 10000 -keep.held 1000 -keep.rate 500 -keep.news 1000 -v
	$(GO) test ./nft/kernel -run XXX -bench BenchmarkClientAddress -benchtime 5x -count 3
EJECTIONS ?= 1000000
ejections: tools ## open EJECTIONS connections over lossy links, in floods and under policies: no endpoint may be ejected
	$(GO) test ./internal/proxy/node -run TestWrongEjections -ejections.connections $$(($(EJECTIONS) / 28)) -timeout 6h -v

SIM_STEPS ?= 100000
SIM_FIRST ?= 1
simulate: ## simulate SIM_STEPS steps of the whole line over a kernel in memory, from seed SIM_FIRST on: half a millisecond each
	GOGC=800 $(GO) test ./nft/kernel -run 'TestSimulation' -sim.steps $(SIM_STEPS) -sim.first $(SIM_FIRST) -timeout 24h -v

MUTATE_SEED ?= 1
MUTATE_FAULTS ?=
mutate: ## plant 200 single faults in the product, one at a time, and list which tests find them: half an hour or more
	cd conformance && $(GO) run ./cmd/mutate -root .. -seed $(MUTATE_SEED) -faults '$(MUTATE_FAULTS)' -out $(abspath $(BIN))/mutations-$(MUTATE_SEED)

cross: ## build bin/verdict-linux-amd64 and -arm64
	@for arch in amd64 arm64; do CGO_ENABLED=0 GOARCH=$$arch $(GO) build -trimpath -buildvcs=auto -o $(BIN)/verdict-linux-$$arch ./cmd/verdict || exit; done

IMAGE ?= verdict:dev
image: ## build the container image, with buildah or docker
	$$(command -v buildah || command -v docker) build -t $(IMAGE) .

release: ## make packages, image, chart and all else of a release from the last commit, into bin/release: VERSION=v0.2.0
	$(GO) run -C deploy/release . --version '$(VERSION)' --out $(abspath $(BIN))/release

# The second build is of a clone in another directory. Without buildah there would be no image in either.
release-check: ## the same, twice: every byte must be equal
	internal/lab/guest/install buildah
	$(MAKE) --no-print-directory release VERSION='$(VERSION)'
	deploy/release/check '$(VERSION)' $(abspath $(BIN))/release

cluster: tools ## test deploy/ at a real API server, and rules and takeovers against a real kube-proxy, after building both
	cd deploy/test && $(GO) test -tags peers -count=1 -v .
	$(GO) test -tags peers -count=1 -v -run 'TestKubeProxy|TestObjects' ./nft/iptshim ./internal/answers/compare ./internal/lab/benchmark \
		./internal/answers/cluster/trial ./internal/gateway
	$(GO) test -tags peers -count=1 -v -run 'TestLiveTakeover/(nft|ip)tables' ./cmd/verdict

# Three nodes with kubelet, containerd and runc in namespaces of this machine. Root only.
REAL_CLUSTER = CGO_ENABLED=0 $(GO) build -C conformance -trimpath -o $(abspath $(BIN))/cluster ./cmd/cluster && $(BIN)/cluster

cluster-up: tools ## start a real cluster of three nodes with Verdict on this machine: docs/dev/TESTING.md
	@internal/lab/guest/install containerd runc containernetworking-plugins buildah
	$(REAL_CLUSTER) up

CLUSTER_TEST ?=
cluster-test: cluster-up ## and tell stories on it under clients: migration, upgrades, deaths, reboot; flags in CLUSTER_TEST
	$(BIN)/cluster test $(CLUSTER_TEST)

GATEWAY_RUNS ?= 1
GATEWAY_CLASS ?= verdict
gateway-conformance: cluster-up ## and run upstream's conformance suite of Gateway API on it, GATEWAY_RUNS times: report in bin/gateway
	cd conformance/gateway && GOTOOLCHAIN=auto $(GO) test -run TestSwapped .
	$(BIN)/cluster gateway suite --runs $(GATEWAY_RUNS) --class $(GATEWAY_CLASS)

gateway-stories: cluster-up ## and tell stories of Gateways on it under clients: weights, grants, dead controllers, 1,000 routes
	$(BIN)/cluster gateway stories

cluster-down: ## end it
	$(REAL_CLUSTER) down

clean:
	rm -rf $(BIN)
