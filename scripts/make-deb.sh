#!/usr/bin/env bash
# Build a Debian package from what install.sh puts into a staging directory: make-deb.sh PYTHON
#
#   BASEPYTHON    interpreter of the distribution, on which the package depends (default /usr/bin/python3)
#   PIP_OPTIONS   more options for pip, as for install.sh
#   OUT           where the package goes (default build/)
#
# The package has a Python environment of its own with all that it needs, so it is for the architecture and
# the Python release that it was built on: build it on the distribution that it is for.
set -euo pipefail
umask 022
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
base=${BASEPYTHON:-/usr/bin/python3}
out=${OUT:-build}
mkdir -p "$out"
out=$(cd "$out" && pwd)
command -v dpkg-deb >/dev/null || { echo "make deb: dpkg-deb is missing; this is for Debian and its kin" >&2; exit 2; }
[ -x "$base" ] || { echo "make deb: there is no $base; apt-get install python3, or set BASEPYTHON" >&2; exit 2; }
minor=$("$base" -c 'import sys; print(sys.version_info[1])')
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "make deb: $base is Python 3.$minor, and 3.11 or newer is needed" >&2; exit 2; }

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/root
install -d "$root" "$root/DEBIAN"
DESTDIR=$root PREFIX=/usr SYSCONFDIR=/etc UNITDIR=/usr/lib/systemd/system BASEPYTHON=$base \
    scripts/install.sh "$python" >&2

install -D -m 0644 LICENSE "$root/usr/share/doc/slurm-synergy/copyright"
gzip -9n < CHANGELOG.md > "$stage/changelog.gz"
install -m 0644 "$stage/changelog.gz" "$root/usr/share/doc/slurm-synergy/changelog.gz"
# With the pages and decisions that the guides link to.
for guide in docs/*.md docs/*/*.md; do
    install -D -m 0644 "$guide" "$root/usr/share/doc/slurm-synergy/${guide#docs/}"
done

# 1.0rc1 comes before 1.0: Debian writes that with a tilde.
version=$("$python" -c 'import re, slurm_synergy; print(re.sub(r"\.?(a|b|rc|dev)(?=\d)", r"~\1", slurm_synergy.__version__))')
package=slurm-synergy_${version}_$(dpkg --print-architecture)
cat > "$root/DEBIAN/control" <<END
Package: slurm-synergy
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The slurm-synergy authors <slurm-synergy@localhost>
Section: admin
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Depends: python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), munge, slurm-client (>= 22.05), systemd | systemd-standalone-sysusers
Recommends: slurm-wlm
Description: resource-sensitive scheduling of deep-learning jobs on stock Slurm
 Decides which GPU jobs of one Slurm partition run, where, and with how much
 CPU and memory, and moves the latter between running jobs. A new installation
 only observes and writes nothing to Slurm.
 .
 Contains the controller, the command synergyctl, the wrapper synergy-srun, and
 the optional helper for compute nodes.
END
echo /etc/slurm-synergy/synergy.yaml > "$root/DEBIAN/conffiles"
install -m 0755 scripts/deb/postinst scripts/deb/prerm scripts/deb/postrm "$root/DEBIAN/"

# xz takes minutes for what is mostly numerical libraries.
dpkg-deb -Zgzip -z4 --root-owner-group --build "$root" "$out/$package.deb" >&2
echo "$out/$package.deb"
