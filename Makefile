# What one does here. `make` alone lists it.
ASKED_BASE := $(BASE_IMAGE)
include .env
ifdef VARIANT
include images/base/$(VARIANT).env
endif
export VARIANT
export BASE_IMAGE := $(or $(ASKED_BASE),$(BASE_IMAGE))
PYTHON ?= python3
VENV := .venv/bin
IMAGE_LOCK := images/base/$(or $(VARIANT),requirements).lock
REVISION := $(shell git describe --always --exclude='*' --dirty 2>/dev/null || echo unknown)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/done ## a cluster of 2 nodes x 2 ranks on this machine, without Docker, trains MNIST
	@$(VENV)/python -m allranks simulate --launcher sing --nnodes 2 --nproc-per-node 2 \
	  $(VENV)/python images/pytorch-dist-mnist/dist.py

test: .venv/done ## every test that can run here; says which it left out, and why
	@$(VENV)/python -m pytest

lint: .venv/done ## ruff, hadolint, shellcheck, yamllint
	$(VENV)/ruff check && $(VENV)/ruff format --check
	$(VENV)/hadolint images/*/Dockerfile compose/*.Dockerfile
	$(VENV)/shellcheck scripts/*.sh .ci/run
	$(VENV)/yamllint --strict -d '{extends: relaxed, rules: {line-length: {max: 120}}}' compose k8s tests

build: $(IMAGE_LOCK) ## the images: allranks-base, pytorch-dist-mnist, pytorch-ddp; VARIANT=cpu: without CUDA
	docker build -t $(BASE) $(BASE_ARGS) .
	docker build -t $(BASE) $(BASE_ARGS) --build-arg PYTHON_VERSION="$$(docker run --rm --network none $(BASE) \
	  python -c 'import platform; print(platform.python_version())')" .
	docker build -t $(DIST_MNIST) --build-arg BASE=$(BASE) --build-arg SOURCE_DATE_EPOCH=$(EPOCH) images/pytorch-dist-mnist
	docker build -t $(DDP) --build-arg BASE=$(BASE) --build-arg SOURCE_DATE_EPOCH=$(EPOCH) images/pytorch-ddp
	scripts/sizes.sh $(IMAGES)
BASE_ARGS = -f images/base/Dockerfile --build-arg VARIANT --build-arg SOURCE_DATE_EPOCH=$(EPOCH) --build-arg REVISION=$(REVISION) \
  --build-arg CREATED=$(CREATED) --build-arg BASE_IMAGE --build-arg BASE_DIGEST=$(BASE_DIGEST) \
  $(foreach name,TORCH TORCHVISION TORCH_CUDA NCCL CUDNN CUDA,--build-arg $(name)_VERSION=$($(name)_VERSION))
# of an image that is here, else of its registry: a build pulls without leaving an image here
BASE_DIGEST = $(strip $(shell (docker image inspect $(BASE_IMAGE) \
  --format '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' 2>/dev/null \
  || $(READ_DIGEST) $(BASE_IMAGE) 2>/dev/null) | sed 's/.*@//'))
READ_DIGEST := docker buildx imagetools inspect --format '{{print .Manifest.Digest}}'
EPOCH := $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
CREATED := $(shell TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null)
IMAGES := $(BASE) $(DIST_MNIST) $(DDP)

sizes: ## how large the images are; fails where one is over its budget (.env)
	@scripts/sizes.sh $(IMAGES)

sbom: .venv/done ## what the images hold, as SPDX and CycloneDX, and the licences of it, in build/sbom
	@scripts/sbom.sh $(IMAGES)

push: ## the images to REGISTRY=host:port/namespace, by three tags each; reads their digests back
	@scripts/push.sh $(IMAGES)

pull-test: ## run the pushed images by their digests
	@scripts/push.sh --pull-test $(IMAGES)

up: ## the cluster of compose/, on the GPU where there is one; builds the image if it is missing
	@docker image inspect $(DIST_MNIST) >/dev/null 2>&1 || $(MAKE) build
	docker compose -f compose/docker-compose.yml \
	  $$(docker info --format '{{json .Runtimes}}' | grep -q nvidia && echo -f compose/gpu.yml) up

lock: .venv/done ## renew the lock files from pyproject.toml, and the digest of the base
	$(VENV)/uv pip compile $(LOCK) --group image -o images/base/requirements.lock
	$(VENV)/uv pip compile $(LOCK) --group dev -c images/base/requirements.lock -o tests/requirements.lock
	$(VENV)/uv pip compile $(LOCK) --group uv -o images/base/uv.lock
	[ ! -f images/base/cpu.lock ] || $(MAKE) -B images/base/cpu.lock
	$(MAKE) pin

pin: # the base by the digest that its registry gives
	digest=$$($(READ_DIGEST) $(BASE_TAG)) \
	  && sed -i.old "/^[A-Z ]*BASE_IMAGE=/s|=.*|=$(BASE_TAG)@$$digest|" .env images/base/Dockerfile \
	  && rm .env.old images/base/Dockerfile.old
BASE_TAG = $(shell sed -n 's/^BASE_IMAGE=\([^@]*\).*/\1/p' .env)
LOCK := -q --upgrade --universal --python-version 3.10 --generate-hashes --no-header

images/base/cpu.lock: # from an index of its own
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install -q --require-hashes -r images/base/uv.lock
	build/uv/bin/uv pip compile $(LOCK) --group image --torch-backend cpu -c images/base/requirements.lock -o $@

clean: ## remove .venv and build/
	rm -rf .venv build

.venv/done: $(IMAGE_LOCK) images/base/uv.lock tests/requirements.lock
	$(PYTHON) -m venv --clear .venv
	$(VENV)/pip install -q --disable-pip-version-check --require-hashes -r images/base/uv.lock
	$(VENV)/uv pip install --python $(VENV)/python --compile-bytecode \
	  $(VARIANT:%=--torch-backend %) --require-hashes -r $(IMAGE_LOCK) -r tests/requirements.lock
	echo $(CURDIR) > "$$($(VENV)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/allranks.pth"
	touch $@

.PHONY: help demo test lint build sizes sbom push pull-test up lock pin clean
.DEFAULT_GOAL := help
