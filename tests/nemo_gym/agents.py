"""An agent of two replies with a tool between them, which samples from a vLLM server."""

TOOL = [7, 8, 9]  # token ids of the result of the tool


class TwoReplies:
    """An agent that samples a reply, adds the result of a tool, and samples another one."""

    # It requests the model of NeMo Gym's config; `seen` are the adapter's folder and the requested version of each run.

    def __init__(self, vllm):
        self.vllm, self.seen, self.before = vllm, [], lambda body: None

    def __call__(self, body):
        answer = self.before(body)
        if answer is not None:
            return answer
        params = body["responses_create_params"]
        self.seen.append((self.vllm.adapters["ebft-policy"], params["model"]))
        text = params["input"][0]["content"]
        prompt = self.vllm.tokenizer(text)["input_ids"]
        first = self.sample(prompt, params)
        context = prompt + first["generation_token_ids"] + TOOL
        second = self.sample(context, params)
        output = [
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1", **first},
            {"type": "function_call_output", "call_id": "1", "output": "7"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}], **second},
        ]
        reward = sum(first["generation_token_ids"]) % 11 / 10
        return {**body, "response": {"output": output}, "reward": reward}

    def sample(self, prompt, params):
        request = {"model": "ebft-policy", "prompt": prompt, "max_tokens": params["max_output_tokens"], "top_k": 0}
        request |= {"temperature": params["temperature"], "top_p": params["top_p"]}
        request |= {"logprobs": 0, "return_token_ids": True}
        found = self.vllm.answer("/v1/completions", request)
        assert isinstance(found, dict), found
        [choice] = found["choices"]
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        return dict(zip(names, (prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])))
