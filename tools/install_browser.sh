#!/usr/bin/env bash
# Installs Debian's Chromium, which the tests of pages drive (tests/html). Needs root.
set -eu
command -v chromium >/dev/null && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
