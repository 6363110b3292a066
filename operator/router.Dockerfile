# syntax=docker/dockerfile:1
# The router of spec.routing: the vLLM project's vllm-router, as it is released.
#
#   docker build -f operator/router.Dockerfile -t inferscale-router .
#
# Its wheel is for x86-64; elsewhere pip builds it from source, which takes a Rust compiler.

# Pin by digest for reproducible builds: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The version whose behaviour docs/routing.md tells and the tests run.
ARG ROUTER_VERSION=0.1.17
RUN python -m venv --without-pip /opt/router \
    && pip --python /opt/router/bin/python install --no-cache-dir "vllm-router==${ROUTER_VERSION}"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="inferscale-router" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 1000 inferscale \
    && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin inferscale
COPY --from=build /opt/router /opt/router
ENV PATH=/opt/router/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
# Numbers, not names: Kubernetes can then check runAsNonRoot.
USER 1000:1000
ENTRYPOINT ["vllm-router"]
