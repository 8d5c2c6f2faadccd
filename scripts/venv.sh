# Sourced by scripts/install and scripts/sglang-cpu, which set `venv`: how packages come into a virtual environment.
log=$venv/install.log

say() { printf '\033[1m%s\033[0m\n' "$*"; }
failed() { echo "The installation failed; the end of $log:" >&2; tail -n 15 "$log" >&2; exit 1; }
pip() { # what pip says goes to the log; on a terminal its last line is shown
  if [ -t 1 ]; then
    { "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2>&1 | tee -a "$log" \
      | while IFS= read -r line; do printf '\r\033[K  %.90s' "$line"; done; } && status=0 || status=$?
    printf '\r\033[K'
  else
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" >>"$log" 2>&1 && status=0 || status=$?
  fi
  return "$status"
}
with_uv() {
  [ -x "$venv/bin/uv" ] || pip install uv || return
  if [ -t 1 ]; then "$venv/bin/uv" pip install --python "$venv/bin/python" "$@"
  else "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@" >>"$log" 2>&1; fi
}
packages() { # uv takes a quarter of pip's time; where it cannot be had, or reaches no index, pip does the same
  with_uv "$@" || pip install --no-compile "$@"
}
cpu_torch() { # the build without CUDA is a tenth of the size; where no index offers it, the usual one does
  pip install --no-compile "torch==2.13.0+cpu" \
    || pip --retries 1 --timeout 20 install --no-compile "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu \
    || pip install --no-compile "torch==2.13.0"
}
