# Two commands do all on a fresh machine: `make demo` and `make test`.
CARGO ?= cargo
DEMO  ?= target/demo
PREP   = target/release/k3-prep
RUN    = target/release/k3-run
# No test or benchmark depends on what ran before it.
export K3_NO_USAGE = 1
PROMPT = Elizabeth was surprised to find that

.PHONY: build demo test check bench bench-memory dist faults sanitize test-clients test-page soak

build:
	$(CARGO) build --locked --release -p k3-prep -p k3-run

# A tiny Kimi K3 that was really trained: convert it, verify it, let it write.
demo: build
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	$(PREP) convert tests/fixtures/demo/snapshot $(DEMO)/container
	$(PREP) verify $(DEMO)/container --rederive
	$(RUN) info $(DEMO)/container
	$(RUN) generate $(DEMO)/container --prompt "$(PROMPT)" -n 120 --temperature 0.7 --top-p 0.9 --seed 1

test:
	$(CARGO) test --locked --workspace

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) test --locked --workspace
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

# Every kernel at the release's shapes, then a whole model: CONTAINER, or the demo's.
CONTAINER ?= $(DEMO)/container
bench: build
	$(CARGO) bench --locked -p k3-run
	mkdir -p $(DEMO)
	test -e $(CONTAINER) || $(PREP) convert tests/fixtures/demo/snapshot $(CONTAINER)
	$(RUN) bench $(CONTAINER)

# The server with other people's clients: the official `openai` package, nginx, Chromium.
# What is not installed is skipped, and that is said. `make demo` first.
CLIENTS = cd tests/clients && PYTHONDONTWRITEBYTECODE=1 $(abspath target/clients/bin/python)

target/clients/bin/python:
	python3 -m venv target/clients
	-target/clients/bin/pip install --quiet openai

test-clients: build target/clients/bin/python
	$(CLIENTS) openai_client.py

test-page: build target/clients/bin/python
	$(CLIENTS) page.py

soak: build target/clients/bin/python
	$(CLIENTS) soak.py

# Stripped binaries with their licence in target/dist.
dist: build
	rm -rf target/dist
	mkdir -p target/dist
	cp $(PREP) $(RUN) LICENSE README.md target/dist/
	strip target/dist/k3-prep target/dist/k3-run

# Damaged files, killed and starved processes, on the built programs: prints a table.
KILLS ?= 200
faults: build
	K3_BIN=$(CURDIR)/target/release K3_KILLS=$(KILLS) $(CARGO) test --locked -p tests --test it -- faults hostile --include-ignored --show-output

# The unsafe parts under the address and leak sanitizers: every unit test of both crates
# that have unsafe code. Needs a nightly toolchain.
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
sanitize:
	RUSTFLAGS=-Zsanitizer=address $(CARGO) +nightly test --locked --target $(HOST) \
		--target-dir target/sanitize -p k3-formats -p k3-run --lib

# Peaks, budgets and streamed bytes on real widths: some 15 GB of files, 20 minutes.
bench-memory: build
	test -d target/bench/snapshot || $(PREP) synth target/bench/snapshot --preset real --layers 5 --experts 48 --vocab 16384
	test -d target/bench/container || $(PREP) convert target/bench/snapshot target/bench/container
	K3_BENCH_CONTAINER=$(CURDIR)/target/bench/container $(CARGO) test --locked --release -p tests -- --ignored --nocapture bench_memory
