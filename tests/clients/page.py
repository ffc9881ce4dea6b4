"""The chat page in headless Chromium: types, sees the stream, stops it, reloads.

Without Chromium the script says so and succeeds. Screenshots go to target/page.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from served import ROOT, Served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not CHROMIUM:
    print("skipped: no Chromium")
    sys.exit(0)
OUT = os.path.join(ROOT, "target/page")


class Browser:
    """Chromium, driven over its debugging pipe: JSON messages that end with a zero byte."""

    def __init__(self, folder):
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()

        def pipes():
            # The browser expects them as 3 and 4; first out of each other's way.
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 "--disable-background-networking", "--window-size=900,760",
                 f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen([CHROMIUM, *flags], preexec_fn=pipes, close_fds=False,
                                        stderr=subprocess.DEVNULL)
        self.number, self.rest, self.session = 0, b"", None
        self.requests, self.problems = [], []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.read, 1 << 16)
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") == "Runtime.exceptionThrown" or (
                    answer.get("method") == "Log.entryAdded"
                    and answer["params"]["entry"]["level"] == "error"):
                self.problems.append(json.dumps(answer["params"]))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script, seconds=15):
        began = time.time()
        while not self.run(script):
            text = lambda: self.run("document.body.innerText")
            assert time.time() - began < seconds, f"in vain: {script}\n{text()}\n{self.problems}"
            time.sleep(0.02)

    def screenshot(self, name):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(os.path.join(OUT, name), "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=20)


REPLY = "document.querySelector('article.assistant:last-of-type')"


def use(browser, served):
    browser.call("Page.navigate", url=served.url + "/")
    browser.until("document.readyState === 'complete' && document.getElementById('model').textContent")
    say = lambda text: (
        browser.run("document.getElementById('prompt').focus()"),
        browser.call("Input.insertText", text=text),
        browser.run("document.getElementById('form').requestSubmit()"))
    say("Who is Mr. Darcy? <img src=x onerror=alert(1)> & <b>bold</b>")
    # The demo model writes hundreds of tokens a second: see and stop in one look.
    browser.until("[..." + REPLY + ".querySelectorAll('.text')].some(t => t.textContent.length > 12) && (document.getElementById('stop').click(), true)")
    assert not browser.run(REPLY + ".querySelector('details').open"), "reasoning is folded"
    assert browser.run("document.querySelectorAll('main img, main b').length") == 0, "text is markup"
    browser.until(REPLY + ".querySelector('.note').textContent.startsWith('stopped')")
    browser.run(REPLY + ".querySelector('details').open = true")
    browser.screenshot("stopped.png")
    began = time.time()
    while served.metric('k3_slots{state="busy"}') > 0:
        assert time.time() - began < 20, "stop cancels the request"
    browser.run("const e = document.getElementById('effort'); e.value = 'none';"
                "document.getElementById('limit').value = 40")
    say("And who is Elizabeth?")
    browser.until(REPLY + ".querySelector('.note').textContent.includes('tokens/s')")
    assert browser.run(REPLY + ".querySelectorAll('.text')[1].textContent.length") > 20
    browser.screenshot("done.png")
    browser.call("Page.reload")
    browser.until("document.querySelectorAll('article').length === 4")
    assert "<b>bold</b>" in browser.run("document.querySelector('article.user').textContent")
    browser.run("document.getElementById('theme').click()")
    browser.screenshot("other-theme.png")
    foreign = [url for url in browser.requests if not url.startswith((served.url, "data:", "about:"))]
    assert not foreign, f"the page asks others: {foreign}"
    assert not browser.problems, browser.problems


def main():
    os.makedirs(OUT, exist_ok=True)
    with Served("--context", "4096") as served, tempfile.TemporaryDirectory() as folder:
        browser = Browser(folder)
        try:
            use(browser, served)
        finally:
            browser.close()
    print(f"page: ok, screenshots in {OUT}")


main()
