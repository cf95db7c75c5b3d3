"""Replies are those of `generate`, of the model with or without its adapter, and their rewards those of training."""

import http.client
import json
import shutil
import socket
import struct
import threading
import urllib.error
import urllib.request

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft import EBFTConfig, EBFTTrainer
from ebft.config.load import load_config
from ebft.errors import ConfigError, DataError, ModelError
from ebft.models.weights import load_gguf_model
from ebft.tools.inference.models import model_in_folder, model_of_run
from ebft.tools.inference.sampling import Sampler, SamplingOptions, Scorer, Session
from ebft.tools.inference.serve import PageServer, serve_page
from tests.structured.trainers import USER, rows

NAN, INF = float("nan"), float("inf")
CHAT = [USER("say 3")]
OPTIONS = SamplingOptions(max_new_tokens=8, temperature=0.8, top_p=0.9, top_k=50, seed=7)


@pytest.fixture
def sampler(folders):
    return Sampler(model_in_folder(str(folders["adapter"])), OPTIONS)


def generated(model, ids, **changes):
    torch.manual_seed(7)
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 8, **changes}
    output = model.generate(torch.tensor([ids]), eos_token_id=[1, 3], pad_token_id=0, **settings)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("prompt", [CHAT, "say 3"], ids=["chat", "completion"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_the_tokens_are_those_of_generate(prompt, greedy, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    chat = lambda: tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    ids = (tokenizer(prompt) if isinstance(prompt, str) else chat())["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(folders["base"]).eval()
    changes = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} if greedy else {}
    options = SamplingOptions(8, 0.0) if greedy else OPTIONS
    sampler = Sampler(model_in_folder(str(folders["adapter"])), options)
    of_base = generated(base, ids, **changes)
    assert sampler.reply_ids(prompt, base=True) == [of_base]
    tuned = PeftModel.from_pretrained(base, folders["adapter"]).eval()
    of_tuned = generated(tuned.get_base_model(), ids, **changes)
    assert sampler.reply_ids(prompt) == [of_tuned] and of_tuned != of_base


def test_the_base_of_a_fully_trained_model(folders, config_file, tmp_path):
    loaded = model_of_run(load_config(config_file("full")))
    base = Sampler(model_in_folder(str(folders["base"])), OPTIONS).reply_ids(CHAT)
    assert Sampler(loaded, OPTIONS).reply_ids(CHAT, base=True) == base
    assert Sampler(loaded, OPTIONS).reply_ids(CHAT) != base
    with pytest.raises(ModelError, match="Give it with --base-model"):
        Sampler(model_in_folder(str(folders["full"])), OPTIONS).reply_ids(CHAT, base=True)
    named = model_in_folder(str(folders["full"]), str(folders["base"]))
    assert Sampler(named, OPTIONS).reply_ids(CHAT, base=True) == base
    copy = shutil.copytree(folders["full"], tmp_path / "with-card")
    (copy / "README.md").write_text(f"---\nbase_model: {folders['base']}\n---\n")
    assert Sampler(model_in_folder(str(copy)), OPTIONS).reply_ids(CHAT, base=True) == base


def test_trained_biases_are_switched_off_with_the_adapter(folders, tmp_path):
    copy = shutil.copytree(folders["adapter"], tmp_path / "adapter")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    loaded = model_in_folder(str(copy))
    with loaded.model(base=True) as model:
        assert model is loaded.base and not isinstance(model, PeftModel)


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_rewards_are_those_of_the_trainer(kind, folders, config_file, tmp_path):
    config = load_config(config_file(kind))
    sampler = Sampler(model_of_run(config), OPTIONS)
    scored = Scorer(sampler, 4)(CHAT, "it is so 3")
    base = AutoModelForCausalLM.from_pretrained(folders["base"])
    policy = PeftModel.from_pretrained(base, folders["adapter"], is_trainable=True) if kind == "adapter" else base
    args = EBFTConfig(
        str(tmp_path / "out"), num_generations=4, per_device_train_batch_size=4, use_whitening=True,
        feature_layers=[0.5], diversity_coef=0.5, report_to="none",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    trainer = EBFTTrainer(policy, args, train_dataset=rows(multi_turn=False), processing_class=tokenizer)
    (reward,) = trainer.reward_funcs
    expected = reward([CHAT] * 4, completion_ids=scored.ids, ground_truth=["it is so 3"] * 4)
    assert scored.rewards == pytest.approx(expected, abs=1e-5) and len(set(scored.texts)) > 1
    assert scored.alignment == pytest.approx(reward.last.alignment.flatten().tolist(), abs=1e-5)
    assert scored.diversity == pytest.approx(reward.last.diversity.flatten().tolist(), abs=1e-5)
    assert Scorer(sampler, 4)(CHAT, "it is so 3", base=True).ids != scored.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_model_that_diverged_is_refused(folders, tmp_path, temperature):
    shutil.copytree(folders["full"], tmp_path / "nan")
    sampler = Sampler(model_in_folder(str(tmp_path / "nan")), SamplingOptions(4, temperature))
    model = sampler.loaded.tuned
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ModelError, match="nan computes NaN, as after training that diverged. Use an earlier"):
        sampler.reply_ids(CHAT)
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match="the weights contain NaN.*layers.1.mlp.down_proj.weight"):
        model_in_folder(str(tmp_path / "nan"))


def test_prompts_that_are_too_long(sampler):
    """Long texts are refused by their first part."""
    limit = sampler.loaded.tuned.config.max_position_embeddings
    with pytest.raises(DataError, match="positions"):
        sampler.reply_ids("a" * limit)
    assert len(sampler.reply_ids("a" * (limit - 2))[0]) <= 2
    long, short = "a" * 10**6, "a " * limit
    for prompt, reference, message in (
        (long, "b", "The prompt has more than"),
        ([{"role": "user", "content": long}], "b", "The prompt has more than"),
        ("b", long, "The reference has more than"),
        ("b", short, "The prompt and the reference have"),
    ):
        with pytest.raises(DataError, match=f"{message}.* tokens, but the model has {limit} positions"):
            Scorer(sampler, 2)(prompt, reference)


def lines(*given):
    """A reader of given lines; an exception is raised."""
    rest = iter(given)

    def read(prompt):
        line = next(rest, EOFError)
        if line in (EOFError, KeyboardInterrupt):
            raise line
        return line

    return read


def test_a_session(sampler, capsys):
    session = Session(sampler, chats=True)
    session.run(lines("say 3", "", "/base", "say 3", "/nothing", "/help"))
    shown = capsys.readouterr().out
    first = sampler.text(sampler.reply_ids(CHAT)[0])
    assert first in shown and sampler.text(sampler.reply_ids(CHAT, base=True)[0]) in shown
    assert "Unknown command /nothing" in shown and "/reset  forget" in shown
    assert session._messages[False] == [*CHAT, {"role": "assistant", "content": first}]
    session.run(lines("/tuned", "and 4", "/exit", "not read"))
    assert [message["role"] for message in session._messages[False]] == ["user", "assistant"] * 2
    session.run(lines("/reset"))
    assert session._messages == {False: [], True: []}


def test_ctrl_c_ends_a_session_at_the_prompt_and_stops_a_reply(sampler, capsys, monkeypatch):
    session = Session(sampler, chats=True)
    session.run(lines(KeyboardInterrupt, "not read"))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(sampler), "reply_ids", interrupted)
    session.run(lines("say 3", "say 4"))
    assert capsys.readouterr().out.count("(stopped)") == 2 and session._messages[False] == []


@pytest.fixture
def address(sampler):
    with PageServer(sampler, True, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


def post(url, body, **headers):
    headers = {"Content-Type": "application/json", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page(address, sampler):
    page = urllib.request.urlopen(address).read().decode()
    assert sampler.loaded.name in page and "{{ABOUT}}" not in page
    reply = sampler.text(sampler.reply_ids(CHAT)[0])
    assert post(f"{address}/reply", {"messages": CHAT}) == (200, reply)
    base = sampler.text(sampler.reply_ids(CHAT, base=True)[0])
    assert post(f"{address}/reply", {"messages": CHAT, "base": True}) == (200, base)
    greedy = Sampler(sampler.loaded, SamplingOptions(4, 0.0, seed=7))
    changed = {"text": "say 3", "temperature": 0, "max_new_tokens": 4}
    assert post(f"{address}/reply", changed) == (200, greedy.text(greedy.reply_ids("say 3")[0]))
    status, scored = post(f"{address}/score", {"messages": CHAT, "reference": "it is", "samples": 2})
    assert status == 200 and json.loads(scored)["rewards"] == pytest.approx(Scorer(sampler, 2)(CHAT, "it is").rewards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "headers", "message"),
    [
        ("/reply", {}, {}, "needs text"),
        ("/reply", [], {}, "JSON object"),
        ("/reply", {"text": "a", "temperature": -1}, {}, "temperature: invalid value -1"),
        ("/reply", {"text": "a", "temperature": NAN}, {}, "temperature: invalid value nan; expected 0 or a number"),
        ("/reply", {"text": "a", "temperature": 1e-320}, {}, "temperature: invalid value 1e-320"),
        ("/reply", {"text": "a", "temperature": 10**400}, {}, "temperature: invalid value 1000"),
        ("/reply", {"text": "a", "max_new_tokens": INF}, {}, "max_new_tokens: invalid value inf; expected an integer"),
        ("/reply", {"text": "a", "max_new_tokens": NAN}, {}, "max_new_tokens: invalid value nan"),
        ("/reply", {"text": "a", "max_new_tokens": 0}, {}, "expected an integer from 1"),
        ("/reply", {"text": "a", "max_new_tokens": 1.5}, {}, "max_new_tokens: invalid value 1.5"),
        ("/reply", {"text": "a", "seed": 2**32}, {}, "expected an integer from 0 to 4294967295"),
        ("/reply", {"text": "a", "seed": "1"}, {}, "seed: invalid value '1'"),
        ("/reply", {"text": "a", "top_k": 2**40}, {}, "top_k: invalid value"),
        ("/reply", {"text": "a", "top_p": 1.1}, {}, "top_p: invalid value 1.1"),
        ("/reply", {"text": "a \ud800"}, {}, "half of a surrogate pair"),
        ("/reply", {"messages": [{"role": "user", "content": "\udfff"}]}, {}, "half of a surrogate pair"),
        ("/score", {"text": "a", "reference": "\ud800"}, {}, "half of a surrogate pair"),
        ("/score", {"text": "a", "reference": "b", "samples": 0}, {}, "samples: invalid value 0"),
        ("/score", {"text": "a", "reference": "b", "samples": 10**9}, {}, "expected an integer from 1 to 256"),
        ("/score", {"text": "a", "reference": "b", "sample": 3}, {}, "'sample': unknown field"),
        ("/reply", {"text": "a", "reference": "b"}, {}, "'reference': unknown field; the fields of /reply"),
        ("/reply", {"text": "a", "base": "yes"}, {}, "base: invalid value 'yes'; expected true or false"),
        ("/reply", b"[" * 200_000, {}, "nested too deeply"),
        ("/reply", b'{"a": ' + b"9" * 5000 + b"}", {}, "not JSON"),
        ("/reply", {"text": "a"}, {"Origin": "http://example.org"}, "Requests from http://example.org"),
        ("/reply", {"text": "a"}, {"Host": "example.org:80"}, "Requests to example.org"),
        ("/reply", {"text": "a"}, {"Host": "127.0.0.1.example.org"}, "Requests to 127.0.0.1.example.org"),
        ("/reply", {"text": "a"}, {"Content-Length": "9" * 5000}, "Content-Length of at most"),
        ("/reply", {"messages": [{"role": "user", "content": [5]}]}, {}, "role and content, both texts"),
        ("/reply", {"messages": [{"role": "user"}]}, {}, "role and content, both texts"),
        ("/score", {"text": "a", "reference": "b", "temperature": 0}, {}, "temperature: 0 gives equal samples"),
        ("/reply", {"text": "a"}, {"Content-Type": "text/plain"}, "must be JSON"),
        ("/score", {"text": "a", "reference": " "}, {}, "reference must be a text"),
        ("/other", {}, {}, "only /reply and /score"),
    ],
)
def test_requests_that_are_refused(path, body, headers, message, address):
    status, text = post(f"{address}{path}", body, **headers)
    assert status in (400, 404) and message in text


def test_names_of_this_machine(address):
    """Port 80 is not named in a Host header; other names may be those of a web site that resolve to this machine."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    for host, status in (("localhost", 200), ("LOCALHOST.", 200), ("[::1]:1", 200), ("example.org", 400)):
        for method, path, body in (("GET", "/", None), ("POST", "/reply", json.dumps({"text": "a"}))):
            connection.request(method, path, body, {"Host": host, "Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == status, host
            response.read()


def test_the_page_on_other_addresses(sampler):
    with PageServer(sampler, True, "::1", 0) as server:
        assert server.address == f"http://[::1]:{server.server_address[1]}"
        with pytest.raises(ConfigError, match="--port: port .* is already in use"):
            PageServer(sampler, True, "::1", server.server_address[1])
    with pytest.warns(UserWarning, match="other machines without a password"), PageServer(sampler, True, "0.0.0.0", 0):
        pass
    with pytest.raises(ConfigError, match="Set --host to an address of this machine"):
        PageServer(sampler, True, "192.0.2.77", 0)


def test_errors_of_a_request(address, monkeypatch, capsys):
    """One that is not expected is sent, also within a reply; that of a client that left is not printed."""
    monkeypatch.setattr(Sampler, "reply_ids", lambda *_, **__: 1 / 0)
    assert post(f"{address}/reply", {"text": "a"}) == (500, "ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in capsys.readouterr().err

    def stops(self, *_, streamer, **__):
        streamer.on_finalized_text("begun")
        raise ModelError("computes NaN")

    monkeypatch.setattr(Sampler, "reply_ids", stops)
    assert post(f"{address}/reply", {"text": "a"}) == (200, "begun\n[Error: computes NaN]")
    host, _, port = address.removeprefix("http://").partition(":")
    for request in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"POST"):
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            client.sendall(request)
    assert urllib.request.urlopen(address).status == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_server_that_stops_ends_the_reply(sampler, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def endless(self, *_, on_token, **__):
        begun.set()
        try:
            while True:
                on_token()
        finally:
            ended.set()

    monkeypatch.setattr(Sampler, "reply_ids", endless)
    with PageServer(sampler, True, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = threading.Thread(target=lambda: pytest.raises(OSError, post, f"{server.address}/reply", {"text": "a"}))
        client.start()
        assert begun.wait(60)
        server.stop()  # returns when nothing is computed any more
        assert ended.is_set()
        server.shutdown()
        thread.join()
        client.join(60)


def test_a_client_that_disconnects_stops_the_generation(address, sampler, monkeypatch):
    begun, closed, stopped, steps = threading.Event(), threading.Event(), threading.Event(), []
    original = Sampler.reply_ids

    def watched(self, *arguments, on_token, **options):
        def step():
            steps.append(None)
            begun.set()
            closed.wait(60)
            on_token()

        try:
            return original(self, *arguments, on_token=step, **options)
        finally:
            stopped.set()

    monkeypatch.setattr(Sampler, "reply_ids", watched)
    host, _, port = address.removeprefix("http://").partition(":")
    body = json.dumps({"text": "say 3", "reference": "b", "max_new_tokens": 16, "temperature": 1}).encode()
    head = f"POST /score HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert begun.wait(60)
    closed.set()
    assert stopped.wait(60) and len(steps) == 1


def test_ctrl_c_ends_the_page(sampler, monkeypatch):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    said = []
    serve_page(sampler, True, "127.0.0.1", 0, said.append)
    assert "serves" in said[0] and said[1] == "Stopped."


def test_the_base_of_a_full_model_is_the_gguf_file_that_it_was_trained_from(folders, tiny_gguf, tmp_path):
    full, both = tmp_path / "full", tmp_path / "both"
    shutil.copytree(folders["full"], full)
    shutil.copytree(folders["base"], both)  # another model in the folder of the file
    shutil.copy(tiny_gguf, both)
    saved = {"base_model": str(both), "gguf_file": tiny_gguf.name}
    (full / "ebft_run.json").write_text(json.dumps(saved))
    base = model_in_folder(str(full)).load_base()
    wanted = load_gguf_model(str(tiny_gguf)).state_dict()
    assert all(torch.equal(weight, wanted[name]) for name, weight in base.state_dict().items())
