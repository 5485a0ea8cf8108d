#!/bin/sh
# Installs a wheel of corewright into the Python of an image, and the command that SageMaker starts.
#   install.sh FOLDER [EXTRAS] [BIN]
# FOLDER has the wheel, EXTRAS are extras of the package, like cpu,json; BIN is the folder of `serve`.
# PYTHON names another interpreter, TORCH_INDEX_URL an index with CPU builds of torch.
set -eu
folder=$1
extras=${2:-json}
bin=${3:-/usr/local/bin}
python=${PYTHON:-python3}

# The image's own packages keep their versions: an engine works with these only.
constraints=$(mktemp)
"$python" -m pip list --format=freeze | grep -vE '^(corewright|pip|setuptools|wheel)==' > "$constraints" || true

case ",$extras," in
*,cpu,*)
  "$python" -m pip install --no-cache-dir -c "$constraints" \
    ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
  ;;
esac
wheel=$(ls "$folder"/corewright-*.whl)
"$python" -m pip install --no-cache-dir -c "$constraints" "${wheel}[$extras]"
rm "$constraints"

# SageMaker starts a container with the argument `serve`.
printf '#!/bin/sh\nexec %s -m orchestrator.cli.main serve-sagemaker "$@"\n' "$python" > "$bin/serve"
chmod 755 "$bin/serve"
