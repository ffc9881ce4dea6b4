"""A `k3-run serve` process for scripts that play its clients."""

import http.client
import json
import os
import re
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUN = os.environ.get("K3_RUN", os.path.join(ROOT, "target/release/k3-run"))
CONTAINER = os.environ.get("K3_CONTAINER", os.path.join(ROOT, "target/demo/container"))


class Served:
    """Starts the server at a free port; leaving the block ends it with SIGTERM."""

    def __init__(self, *options, container=CONTAINER):
        command = [RUN, "serve", container, "--port", "0", *options]
        environment = {**os.environ, "K3_NO_USAGE": "1"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = []
        while True:
            line = self.process.stderr.readline()
            if not line:
                raise SystemExit("the server did not start:\n" + "".join(self.log))
            self.log.append(line)
            found = re.search(r"listening at http://([\d.]+):(\d+)", line)
            if found:
                self.host, self.port = found[1], int(found[2])
                break
        # A pipe that nobody reads would stop the server.
        import threading
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        while self.get("/health")[0] != 200:
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        code = self.process.wait(timeout=120)
        assert code == 0, f"the server ended with {code}:\n" + "".join(self.log[-20:])

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def connect(self, timeout=600):
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def get(self, path):
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()

    def post(self, path, body, timeout=600):
        connection = self.connect(timeout)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    def resident(self):
        """Anonymous memory in bytes: mapped weights come and go with the page cache."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"RssAnon:\s+(\d+)", status.read())[1]) << 10

    def metric(self, name):
        text = self.get("/metrics")[1].decode()
        return float(re.search("^" + re.escape(name) + " (.*)$", text, re.M)[1])
