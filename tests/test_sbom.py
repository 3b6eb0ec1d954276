"""scripts/sbom.sh on an image with one package of each kind; that an image's own are found is syft's affair."""

import io
import json
import os
import tarfile

import pytest
from conftest import ROOT, run

IMAGE = f"allranks-sbom-{os.getpid()}"
FILES = {
    "etc/os-release": "ID=debian\nVERSION_ID=12\n",
    "var/lib/dpkg/status": "Package: tini\nStatus: install ok installed\nVersion: 0.19.0-1\nArchitecture: amd64\n\n",
    "opt/venv/lib/python3.11/site-packages/torch-2.5.1.dist-info/METADATA": "Name: torch\nVersion: 2.5.1\n\n",
    "usr/share/doc/python-licences.txt": "torch 2.5.1: BSD-3-Clause\n",
}


@pytest.fixture
def image(engine):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    engine.api.import_image_from_data(buffer.getvalue(), repository=IMAGE, tag="latest")
    yield IMAGE
    engine.images.remove(IMAGE, force=True)
    for file in (ROOT / "build/sbom").glob(f"{IMAGE}.*"):
        file.unlink()


def test_packages_of_both_kinds_and_licences(image):
    done = run(ROOT / "scripts/sbom.sh", image)
    assert (done.returncode, done.stdout) == (0, f"build/sbom/{image}: 2 packages\n"), done.stderr
    spdx, cyclonedx = (
        json.loads((ROOT / f"build/sbom/{image}.{kind}.json").read_text()) for kind in ("spdx", "cyclonedx")
    )
    assert spdx["spdxVersion"].startswith("SPDX-") and cyclonedx["bomFormat"] == "CycloneDX"
    for packages, version in ((spdx["packages"], "versionInfo"), (cyclonedx["components"], "version")):
        assert {("tini", "0.19.0-1"), ("torch", "2.5.1")} <= {(one["name"], one.get(version)) for one in packages}
    assert (ROOT / f"build/sbom/{image}.licences.txt").read_text() == FILES["usr/share/doc/python-licences.txt"]
