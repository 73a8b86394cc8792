# One image for every service; the command selects which: docker run kvbus frontend --nats nats://host:4222
#   --build-arg TORCH=               no torch: everything but workers with the torch engine (a tenth of the size)
#   --build-arg EXTRAS=index,models,nkeys,s3  extras of the distribution
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/kvbus
# Layers from the rarely to the often changed: torch, the other dependencies, the code.
ARG TORCH=torch==2.13.0
RUN [ -z "$TORCH" ] || /opt/kvbus/bin/pip install $TORCH
WORKDIR /src
ARG EXTRAS=index,models,nkeys,s3
COPY pyproject.toml README.md LICENSE ./
COPY deploy/docker/requirements.py deploy/docker/requirements.py
RUN python3 deploy/docker/requirements.py "$EXTRAS${TORCH:+,torch}" >/tmp/requirements.txt \
    && /opt/kvbus/bin/pip install hatchling -r /tmp/requirements.txt
COPY libs libs
COPY services services
RUN /opt/kvbus/bin/pip install --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
ARG EXTRAS=index,models,nkeys,s3
RUN useradd --uid 10001 --create-home --home-dir /home/kvbus kvbus \
    && install -d -o kvbus -g kvbus /models /var/lib/kvbus /var/lib/kvbus/g3 /var/lib/kvbus/g4 /run/kvbus
COPY --from=build /opt/kvbus /opt/kvbus
ENV PATH=/opt/kvbus/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVBUS_CACHE_DIR=/models \
    KVBUS_HEALTH_HOST=0.0.0.0 \
    KVBUS_HEALTH_PORT=9000 \
    KVBUS_LOG_FORMAT=json
USER kvbus
# For the processor the image is built on; on another one the indexer compiles once, at its first start.
RUN case ",$EXTRAS," in *,index,*) python3 -m kvbus_blocks.flash ;; esac
WORKDIR /home/kvbus
EXPOSE 8000 9000
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=30 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9000/readyz', timeout=2)"]
ENTRYPOINT ["kvbus"]
CMD ["--help"]
