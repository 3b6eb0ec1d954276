"""scripts/push.sh, from a repository of its own, with small images, to a real registry on loopback."""

import base64
import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import urllib.request
import uuid

import pytest
from conftest import ROOT, leave_out, run, start, wait_until
from docker.errors import APIError, NotFound

VERSION = "2.5.1-cuda12.2"
LABEL = "LABEL org.opencontainers.image"
MANIFESTS = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
CONFIG = """
version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {}}}}}
http: {{addr: "127.0.0.1:0"}}
"""


class Registry:
    """A docker-registry on a port of its choice; its access log says what was asked of it."""

    def __init__(self, process, log):
        self.process, self.log = process, log
        wait_until(lambda: self.process.poll() is not None or self.listening())
        assert self.process.poll() is None, log.read_text()
        self.host = self.listening()[1]
        self.name = f"{self.host}/team"

    def listening(self):
        return re.search(r"listening on (127\.0\.0\.1:\d+)", self.log.read_text())

    def asked(self, *methods):
        """The paths under team/ that were asked for with one of the methods."""
        return re.findall(rf'"(?:{"|".join(methods)}) /v2/team/(\S+) HTTP', self.log.read_text())

    def uploads(self, image):
        """The digests of the blobs that were sent to the image's repository."""
        return re.findall(rf"PUT /v2/team/{image}/blobs/uploads/\S+digest=sha256%3A(\w+)", self.log.read_text())

    def get(self, image, tag):
        """The manifest, and its digest."""
        request = urllib.request.Request(f"http://{self.host}/v2/team/{image}/manifests/{tag}")
        request.add_header("Accept", MANIFESTS)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer), answer.headers["Docker-Content-Digest"]


@pytest.fixture
def registry(tmp_path):
    binary = shutil.which("docker-registry", path=f"{os.environ['PATH']}:/usr/bin")
    if not binary:
        leave_out("docker-registry is not there: apt-get install docker-registry")
    config, log = tmp_path / "registry.yml", tmp_path / "registry.log"
    config.write_text(CONFIG.format(tmp_path / "registry"))
    with start("sh", "-c", 'exec "$0" serve "$1" >"$2" 2>&1', binary, config, log) as process:
        try:
            wait_until(log.exists)
            yield Registry(process, log)
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit, and push.sh in it."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/push.sh", checkout / "scripts")
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    commit(checkout)
    return checkout


def git(checkout, *args):
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    done = run("git", *identity, *args, cwd=checkout, timeout=30, GIT_CONFIG_GLOBAL="/dev/null")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(checkout):
    git(checkout, "commit", "-q", "--allow-empty", "-m", uuid.uuid4().hex)


@pytest.fixture(scope="module")
def shell(engine):
    """A tar of allranks-base's shell and its libraries: the smallest image that runs something."""
    command = "tar -ch $(ldd /bin/sh | grep -o '/[^ ]*') /bin/sh 2>/dev/null | base64"
    options = {"entrypoint": ["sh", "-c", command], "network_mode": "none", "remove": True}
    return base64.b64decode(engine.containers.run("allranks-base", **options))


@pytest.fixture
def images(engine, shell, checkout):
    """A base of some MB and its child, as built from the checkout; all that comes of them is gone after the test."""
    base, child = names = [f"push-test-{uuid.uuid4().hex[:8]}-{name}" for name in ("base", "child")]
    labels = [f"{LABEL}.version={VERSION}", f"{LABEL}.revision={git(checkout, 'rev-parse', '--short', 'HEAD')}"]
    try:
        engine.api.import_image_from_data(with_file(shell, 2_000_000), repository=base, tag="latest", changes=labels)
        container = engine.containers.create(base, "/bin/sh")
        try:
            container.put_archive("/", with_file(None, 1000))
            container.commit(child, "latest")
        finally:
            container.remove(force=True)
        yield names
    finally:
        for image in engine.api.images():  # not images.list(), which stumbles over what others remove meanwhile
            references = (image["RepoTags"] or []) + (image["RepoDigests"] or [])
            for reference in references:
                if any(name in reference for name in names):
                    remove(engine, reference)


def with_file(tar, size):
    """The tar, and a file in it that no layer has had before."""
    buffer = io.BytesIO(tar)
    with tarfile.open(fileobj=buffer, mode="a" if tar else "w") as archive:
        member = tarfile.TarInfo(uuid.uuid4().hex)
        member.size = size
        archive.addfile(member, io.BytesIO(os.urandom(size)))
    return buffer.getvalue()


def remove(engine, reference):
    try:
        engine.api.remove_image(reference, force=True)
    except NotFound:
        pass  # it went with another reference
    except APIError as error:
        assert "No such image" in str(error)


@pytest.fixture
def push(checkout, registry):
    """Run push.sh from below the checkout."""

    def push(*args, **environ):
        environ = {"REGISTRY": registry.name, "DIRTY": ""} | environ
        return run("../scripts/push.sh", *args, cwd=checkout / "scripts", timeout=120, **environ)

    return push


def digests(checkout):
    return (checkout / "build/digests.txt").read_text().splitlines()


def refused(done, status, *words):
    """One line, that has the words; nothing on standard output."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
    assert done.stderr.startswith("push.sh: ") and "; expected " in done.stderr
    for word in words:
        assert word in done.stderr
    return True


def test_three_tags_of_each_image_have_one_digest_that_can_be_read_back(checkout, registry, images, push):
    done = push(*images)
    assert (done.returncode, done.stderr) == (0, "")
    revision = git(checkout, "rev-parse", "--short", "HEAD")
    expected = []
    for image, line in zip(images, done.stdout.splitlines(), strict=True):
        found = {tag: registry.get(image, tag)[1] for tag in ("latest", VERSION, revision)}
        assert len(set(found.values())) == 1
        tags = f"{registry.name}/{image}:{revision} tags=latest,{VERSION},{revision}"
        assert re.fullmatch(rf"pushed {tags} digest={found['latest']} seconds=\d+", line)
        expected += [f"{registry.name}/{image}:{tag}@{digest}" for tag, digest in found.items()]
    assert digests(checkout) == expected
    assert push(*images).returncode == 0, "a second push: build/digests.txt made the tree dirty"


def test_the_base_goes_first_and_its_layer_travels_once(registry, images, push):
    base, child = images
    assert push(child, base).returncode == 0
    layers = [layer["digest"].removeprefix("sha256:") for layer in registry.get(child, "latest")[0]["layers"]]
    assert len(layers) == 2
    assert layers[0] in registry.uploads(base)
    assert layers[0] not in registry.uploads(child)
    assert layers[1] in registry.uploads(child)


@pytest.mark.parametrize("change", ["untracked", "modified"])
def test_a_dirty_tree_is_refused(checkout, registry, images, push, change):
    name = {"untracked": "new.txt", "modified": "scripts/push.sh"}[change]
    with open(checkout / name, "a") as file:
        file.write("\n")
    assert refused(push(*images), 65, "changes", name, "DIRTY=1")
    assert registry.asked("POST", "PUT", "PATCH") == []


def test_an_image_of_another_revision_is_refused(checkout, registry, images, push):
    before = git(checkout, "rev-parse", "--short", "HEAD")
    commit(checkout)
    assert refused(push(*images), 67, images[0], before, git(checkout, "rev-parse", "--short", "HEAD"), "DIRTY=1")
    assert registry.asked("POST", "PUT", "PATCH") == []


@pytest.mark.parametrize("why", ["tree", "revision"])
def test_dirty_1_pushes_and_its_tag_says_so(checkout, registry, images, push, why):
    if why == "tree":
        (checkout / "new.txt").touch()
    else:
        commit(checkout)
    done = push(*images, DIRTY="1")
    assert (done.returncode, done.stderr) == (0, "")
    revision = git(checkout, "rev-parse", "--short", "HEAD")
    tags = [path.split("/")[-1] for path in registry.asked("PUT") if f"{images[0]}/manifests/" in path]
    assert tags == ["latest", VERSION, f"{revision}-dirty"]


@pytest.mark.parametrize(
    "environ, args, status, words",
    [
        ({"REGISTRY": ""}, None, 64, "REGISTRY is ''; expected host:port/namespace"),
        ({"REGISTRY": "http://127.0.0.1:1/team"}, None, 64, "REGISTRY is 'http:"),
        ({"REGISTRY": "127.0.0.1:1/TEAM"}, None, 64, "must be lowercase"),
        ({}, (), 64, "no IMAGE"),
        ({}, ("--pull",), 64, "--pull"),
        ({}, ("push-test-absent",), 66, "make build"),
        ({"DOCKER_HOST": "tcp://127.0.0.1:1"}, None, 66, "Cannot connect to the Docker daemon"),
        ({}, ("--pull-test", "push-test-absent"), 66, "no line of"),
    ],
)
def test_what_is_missing_is_said_in_one_line(registry, images, push, environ, args, status, words):
    assert refused(push(*(images if args is None else args), **environ), status, words)
    assert registry.asked("POST", "PUT", "PATCH") == []


@pytest.mark.parametrize("version", ["", "2.5.1+cu121"])
def test_a_version_that_cannot_be_a_tag_is_refused(engine, registry, images, push, version):
    base, child = images
    container = engine.containers.create(child, "/bin/sh")
    try:
        container.commit(child, "latest", changes=f'{LABEL}.version="{version}"')
    finally:
        container.remove()
    assert refused(push(base, child), 66, child, f"'{version}'")
    assert registry.asked("POST", "PUT", "PATCH") == []


def test_a_registry_that_is_not_there_ends_in_one_line(checkout, images, push):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert refused(push(*images, REGISTRY=f"{address}/team"), 68, address, "refused")
    assert digests(checkout) == []


@pytest.mark.parametrize("tag", [0, 1, 2])
def test_another_digest_in_the_registry_is_an_error_at_each_tag(tmp_path, checkout, images, push, tag):
    tag = ("latest", VERSION, git(checkout, "rev-parse", "--short", "HEAD"))[tag]
    liar, lie = tmp_path / "bin/docker", f"sha256:{'0' * 64}"
    liar.parent.mkdir()
    liar.write_text(
        f'#!/bin/sh\ncase "$*" in *imagetools*:{tag}) echo {lie};; *) exec {shutil.which("docker")} "$@";; esac\n'
    )
    liar.chmod(0o755)
    done = push(images[0], PATH=f"{liar.parent}:{os.environ['PATH']}")
    assert refused(done, 69, f":{tag} is {lie}")
    assert lie not in str(digests(checkout))


def test_pull_test_pulls_by_digest_and_runs(engine, checkout, registry, images, push):
    base, child = images
    assert push(*images).returncode == 0
    engine.api.remove_image(child)  # the base stays: its name must live on
    pulled = len(registry.asked("GET"))
    done = push("--pull-test", *images, PULL_TEST_COMMAND="/bin/sh -c exit")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.fullmatch(r"pulled (\S+) seconds=\d+", line)[1] for line in done.stdout.splitlines()]
    assert lines == digests(checkout) and len(lines) == 6
    asked = registry.asked("GET", "HEAD")[pulled:]
    for line in lines:
        assert f"{line.split('/team/')[1].split(':')[0]}/manifests/{line.split('@')[1]}" in asked
    tags = {
        tag
        for image in engine.api.images()
        for tag in image["RepoTags"] or []
        if tag.startswith(registry.name) and "@" not in tag
    }
    assert tags == set() and engine.api.inspect_image(base)


@pytest.mark.parametrize("command, words", [("/bin/absent", "no such file"), ("/bin/sh -c 'exit", "Unterminated")])
def test_pull_test_fails_when_the_command_fails(images, push, command, words):
    assert push(images[0]).returncode == 0
    done = push("--pull-test", images[0], PULL_TEST_COMMAND=command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (70, "", 3)
    assert done.stderr.count(words) == 3


def test_pull_test_fails_when_one_digest_is_not_there(checkout, images, push):
    assert push(images[0]).returncode == 0
    first, *others = digests(checkout)
    lines = [f"{first.split('@')[0]}@sha256:{'0' * 64}", *others]
    (checkout / "build/digests.txt").write_text("\n".join(lines) + "\n")
    done = push("--pull-test", images[0], PULL_TEST_COMMAND="/bin/sh -c exit")
    assert (done.returncode, done.stdout.count("pulled "), done.stderr.count("\n")) == (70, 2, 1)
    assert lines[0] in done.stderr


def test_the_base_is_pinned_by_the_digest_that_its_registry_gives(tmp_path, registry, images, push):
    assert push(images[0]).returncode == 0
    files = [tmp_path / ".env", tmp_path / "images/base/Dockerfile"]
    files[1].parent.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    base = f"{registry.name}/{images[0]}:latest"
    files[0].write_text(f"BASE_IMAGE={base}@sha256:old\nBASE=name\n")
    files[1].write_text(f"ARG BASE_IMAGE={base}\nFROM ${{BASE_IMAGE}}\nARG BASE_IMAGE BASE_DIGEST=\n")
    done = run("make", "pin", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pinned = f"BASE_IMAGE={base}@{registry.get(images[0], 'latest')[1]}\n"
    assert files[0].read_text() == f"{pinned}BASE=name\n"
    assert files[1].read_text() == f"ARG {pinned}FROM ${{BASE_IMAGE}}\nARG BASE_IMAGE BASE_DIGEST=\n"


def test_help_is_the_header(push):
    done = push("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("push.sh [--pull-test] IMAGE...: ") and "set -e" not in done.stdout
    assert done.stdout.rstrip().endswith("a pull test failed.")
