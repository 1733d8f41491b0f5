# syntax=docker/dockerfile:1
# The service on a CPU. Build from the root of the repository:
#   docker build --build-arg TORCH_INDEX=URL -t neuralmean .
# TORCH_INDEX is the index of CPU wheels that the installation page of PyTorch names; without it pip may bring CUDA.
FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/nmd
ENV PATH=/opt/nmd/bin:$PATH
# torch first, alone: it is most of the image and changes seldom.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt '.[serve,grpc,otel]'
# What only building and testing torch needs: 200 MB.
RUN packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && rm -rf "$packages/torch/test" "$packages/torch/include" \
    && find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete \
    && pip uninstall --yes pip

FROM python:3.12-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin nmd \
    && install --directory --owner nmd --group nmd /var/lib/nmd
COPY --from=build /opt/nmd /opt/nmd
ENV PATH=/opt/nmd/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
WORKDIR /models
VOLUME /var/lib/nmd
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
ENTRYPOINT ["nmd"]
CMD ["serve", "/models/model.nmd", "--host", "0.0.0.0", "--grpc-port", "8001", "--state", "/var/lib/nmd/monitor.state"]
