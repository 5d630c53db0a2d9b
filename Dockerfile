# One image for everything: the server (`smon serve`), workers (`smon worker`), agents (`smon-agent`).
# docs/install.md says how to run it. It holds no secret: tokens and passwords come at run time.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/smon
# The pins first: this layer is made anew only when they change.
COPY requirements.txt ./
RUN /opt/smon/bin/pip install --requirement requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY dashboards dashboards
COPY ingest_agents ingest_agents
COPY migrations migrations
COPY smon smon
RUN /opt/smon/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && /opt/smon/bin/pip install --constraint requirements.txt "$(ls /wheels/smon-*.whl)[server]" \
    && /opt/smon/bin/pip uninstall --yes pip setuptools

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="SMon" \
    org.opencontainers.image.description="Finds out why large LLM training jobs are slow" \
    org.opencontainers.image.licenses="Apache-2.0"
# Numbers, not names: Kubernetes can check runAsNonRoot, and volumes can be prepared for them.
# A named volume that is empty takes its owner from the folders made here.
RUN groupadd --gid 10001 smon \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/smon \
        --shell /usr/sbin/nologin smon \
    && install -d -o 10001 -g 10001 -m 0750 /var/lib/smon /var/lib/smon/wal /var/lib/smon/objects \
        /var/spool/smon
COPY --from=build /opt/smon /opt/smon
# Nothing is written outside the data folder, so the root file system may be read-only.
ENV PATH=/opt/smon/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SMON_DATA_DIR=/var/lib/smon \
    SMON_HOST=0.0.0.0 \
    SMON_PORT=8080 \
    SMON_OPS_PORT=8081
USER 10001:10001
WORKDIR /var/lib/smon
EXPOSE 8080 8081
# Of a server; workers and agents turn it off. Is it alive: whether it is ready, /readyz says.
# http.client, because urllib would ask a proxy that the environment names.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['SMON_OPS_PORT']), timeout=4); c.request('GET', '/healthz'); sys.exit(c.getresponse().status != 200)"]
CMD ["smon", "serve"]
