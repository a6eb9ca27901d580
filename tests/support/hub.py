"""A hub on a real socket: the endpoints that a push and a download use, and the files of one repository."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Keeps what is pushed.

    Attributes:
        requests: method, path and body of each request.
        objects: large files by SHA-256.
        files: the repository's files by name.
    """

    def __init__(self, token):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.token, self.requests, self.objects, self.files = token, [], {}, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, content, status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self):
        hub = self.server
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        hub.requests.append((self.command, path, body))
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            name = json.loads(body)
            self.reply({"url": f"{hub.url}/{name['organization']}/{name['name']}"})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif "/preupload/" in path:  # large files are sent as objects first, as on the hub
            modes = [
                (file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular")
                for file in json.loads(body)["files"]
            ]
            self.reply({"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            actions = [
                one | {"actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.reply({"objects": actions})
        elif path.startswith("/objects/"):
            hub.objects[path.rpartition("/")[2]] = body
            self.reply({})
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    hub.files[line["value"]["path"]] = hub.objects[line["value"]["oid"]]
            self.reply({"commitUrl": f"{hub.url}/me/bundle/commit/{COMMIT}", "commitOid": COMMIT})
        elif "/revision/" in path:
            self.reply({"id": "me/bundle", "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]})
        elif "/tree/" in path:
            self.reply(
                [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in hub.files.items()]
            )
        else:
            data = hub.files[path.partition(f"/resolve/{COMMIT}/")[2]]
            self.reply(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    def read_chunk(self):
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815  http.server's names


@contextlib.contextmanager
def hub(token):
    with Hub(token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
