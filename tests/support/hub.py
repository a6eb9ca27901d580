"""A hub on a real socket: the endpoints that a download uses, and the files of one repository."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


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
        path, files = self.path.split("?")[0], self.server.files
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.reply({"error": "Invalid username or password."}, 401)
        elif "/revision/" in path:
            self.reply({"id": "me/bundle", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif "/tree/" in path:
            self.reply(
                [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in files.items()]
            )
        else:
            data = files[path.partition(f"/resolve/{COMMIT}/")[2]]
            self.reply(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    do_GET = do_HEAD = handle_request  # noqa: N815  http.server's names


@contextlib.contextmanager
def hub(token, files):
    """Serve the files of the repository me/bundle, and yield the hub's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.token, server.files = token, files
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
