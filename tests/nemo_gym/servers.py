"""Small servers that speak the protocol of NeMo Gym, after its source: a head, resources servers, agent servers."""

import json
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


class Endpoint:
    """Responses are `answer(path, body) -> value`, or `(status, value)`; None hangs up. `requests` are the bodies."""

    def __init__(self, answer):
        self.answer, self.requests, self._lock = answer, [], threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.respond(None)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.requests.append(body)
                self.respond(body)

            def respond(self, body):
                found = endpoint.answer(self.path, body)
                if found is None:
                    self.connection.close()
                    return
                status, value = found if isinstance(found, tuple) else (200, found)
                data = json.dumps(value).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client gave up
                    pass

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        report = self.server.handle_error  # but not of clients that hang up, which may be during later tests
        self.server.handle_error = lambda *given: isinstance(sys.exception(), OSError | ValueError) or report(*given)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Gym:
    """A head server and the servers that it lists: `gym.resources(name, reward)`, `gym.agent(name, of, run)`."""

    def __init__(self):
        self.config, self.endpoints = {}, []
        self.head = self.serve(lambda path, body: self.head_answer(path))

    def serve(self, answer):
        self.endpoints.append(Endpoint(answer))
        return self.endpoints[-1]

    def head_answer(self, path):
        if path != "/global_config_dict_yaml":
            return 404, {"detail": "Not Found"}
        head = {"host": "127.0.0.1", "port": self.head.port}
        return yaml.safe_dump({"head_server": head, **self.config}, sort_keys=False)

    def serve_at(self, expected, answer):
        """A server that answers POST requests to one path."""

        def answered(path, body):
            assert body is None or path == expected, path
            return (404, {"detail": "Not Found"}) if body is None else answer(body)

        return self.serve(answered)

    def resources(self, name, reward):
        """A resources server; `reward(body)` returns the reward of a request to /verify, or a whole answer."""
        wrapped = lambda body, found: {**body, "reward": found} if isinstance(found, int | float) else found
        endpoint = self.serve_at("/verify", lambda body: wrapped(body, reward(body)))
        self.add(name, "resources_servers", endpoint, domain="math")
        return endpoint

    def agent(self, name, run, of="tools", model="policy_model"):
        """An agent server of the resources server `of`; `run(body)` returns the answer of a request to /run."""
        endpoint = self.serve_at("/run", run)
        links = {"resources_server": {"type": "resources_servers", "name": of}}
        links |= {"model_server": {"type": "responses_api_models", "name": model}}
        self.add(name, "responses_api_agents", endpoint, **links)
        return endpoint

    def model(self, name="policy_model", **settings):
        """The entry of a model server; agents in these tests sample themselves."""
        given = {"model": "ebft-policy", "return_token_id_information": True, **settings}
        self.add(name, "responses_api_models", self.serve(lambda path, body: {}), **given)

    def add(self, name, kind, endpoint, **settings):
        entry = {"entrypoint": "app.py", "host": "127.0.0.1", "port": endpoint.port, **settings}
        self.config[name] = {kind: {"implementation": entry}}

    def stop(self):
        for endpoint in self.endpoints:
            endpoint.stop()


@contextmanager
def gym():
    made = Gym()
    try:
        yield made
    finally:
        made.stop()


def config_of(*datasets, **changes):
    """A config whose replies the servers of NeMo Gym score."""
    from ebft.run.config.schema import RunConfig

    own = {"base_model": "unused", "rl": "grpo", "trl": {"reward_funcs": ["nemo_gym_verify"]}}
    own |= {"nemo_gym_enabled": True, "nemo_gym_auto_start": False, "nemo_gym_datasets": list(datasets)}
    return RunConfig.from_dict({**own, **changes})


def text_in(body):
    """The text of the reply in a request to /verify."""
    return body["response"]["output"][0]["content"][0]["text"]


def slow(seconds, value):
    time.sleep(seconds)
    return value


def row(text, **columns):
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **columns}
