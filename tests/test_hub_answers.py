"""What is said where the hub doesn't give a model, by the hub's own client against a server that answers as the hub does."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ASK = """
import json
from crosstune.data.tokenizer import load_tokenizer
from crosstune.errors import ModelError
from crosstune.memory.config import read_config
from crosstune.model.base import load_config
from crosstune.recipe.sections import Model

fixes = []
for ask in (read_config, load_config, load_tokenizer):
    try:
        ask(Model(name="someone/some-model"))
    except ModelError as error:
        fixes.append(error.fix)
print(json.dumps(fixes))
"""


class Refusing(BaseHTTPRequestHandler):
    """Nothing but refusals, with the header by which the hub says why."""

    def do_GET(self):
        self.send_response(self.server.status)
        header = "X-Error-Message" if " " in self.server.why else "X-Error-Code"
        self.send_header(header, self.server.why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        """Silent."""


def fixes_of(tmp_path, **environment):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **environment}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", ASK], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("status", "why", "words"),
    [
        (403, "GatedRepo", "Ask for access on the model's page"),
        (404, "RepoNotFound", "Check the spelling"),
        (404, "RevisionNotFound", "Check model.revision"),
        (401, "Invalid credentials in Authorization header", "The hub doesn't accept this computer's token"),
        (404, "EntryNotFound", ("Give a hub id, a folder", "Check model.name (or model.tokenizer)")),
    ],
)
def test_the_fix_follows_what_the_hub_said(tmp_path, status, why, words):
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        server.status, server.why = status, why
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fixes = fixes_of(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert len(fixes) == 3
    assert all(fix.startswith(words) for fix in fixes), fixes


def test_without_a_connection_the_fix_is_a_folder(tmp_path):
    fixes = fixes_of(tmp_path, HF_HUB_OFFLINE="1")
    assert len(fixes) == 3
    assert all(fix.startswith("Check the connection") for fix in fixes), fixes
