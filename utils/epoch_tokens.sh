# shellcheck shell=bash disable=SC1091
# Sourced: defines DATA_100M and others, tokens per epoch of the published subsets. They are in the generated file.
source "$(dirname "${BASH_SOURCE[0]}")/model_params.sh"
