"""The parts of vLLM's HTTP interface that training uses, over a tiny model on a CPU; test_vllm.py runs the real one."""

import threading

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.nemo_gym.servers import Endpoint


class StandInVLLM:
    """`port`; `adapters` {name: folder} that are loaded now, and `loaded`, every (name, folder) so far."""

    def __init__(self, folder):
        self.folder, self.adapters, self.loaded = str(folder), {}, []
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, self.lock = None, threading.Lock()
        self.endpoint = Endpoint(self.answer)
        self.port = self.endpoint.port

    def stop(self):
        self.endpoint.stop()

    def answer(self, path, body):
        with self.lock:
            return getattr(self, path.strip("/").replace("/", "_"))(body)

    def health(self, _):
        return {}

    def v1_models(self, _):
        base = {"id": self.folder, "root": self.folder, "parent": None, "max_model_len": 128}
        return {"data": [base, *({"id": n, "root": p, "parent": self.folder} for n, p in self.adapters.items())]}

    def tokenize(self, body):
        return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}

    def v1_load_lora_adapter(self, body):
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return 400, {"message": f"{name} has already been loaded"}
        if self.model is None:
            base = AutoModelForCausalLM.from_pretrained(self.folder).eval()
            self.model = PeftModel.from_pretrained(base, path, adapter_name=name)
        else:
            self.model.load_adapter(path, adapter_name=name)
        self.adapters[name] = path
        self.loaded.append((name, path))
        return {}

    def v1_unload_lora_adapter(self, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"message": "not found"}
        return {}  # its weights stay, as requests in flight may use them; a reload replaces them

    def v1_completions(self, body):
        if body["model"] not in (self.folder, *self.adapters):
            return 404, {"message": "no such model"}
        choices = []
        for _ in range(body.get("n", 1)):
            stops = body.get("stop_token_ids") or ()
            ids, logps = self.sample(body["model"], body["prompt"], body["max_tokens"], body["temperature"], stops)
            choices.append({"token_ids": ids, "logprobs": {"token_logprobs": logps}, "finish_reason": "stop"})
        return {"choices": choices}

    @torch.no_grad()
    def sample(self, name, prompt, max_tokens, temperature, stops):
        if name == self.folder:
            model = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        else:
            self.model.set_adapter(name)
            model = self.model.eval()
        ids, logps = [], []
        while len(ids) < max_tokens and not (ids and ids[-1] in stops):
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].double()
            scores = (logits / temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1)))
            logps.append(float(scores[ids[-1]]))
        return ids, logps
