"""Run where tinker and its cookbook are installed: asks a server, and prints what came back as JSON.

python tinker_script.py URL MODEL API_KEY ROWS
"""

# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

import tinker
import torch
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator

SAMPLED_LOGP = -5.0


def datum(row: list[int]) -> tinker.Datum:
    """A row of which the first half is a prompt."""
    mask = torch.tensor([float(index >= len(row) // 2) for index in range(1, len(row))])
    tensors = {
        "target_tokens": torch.tensor(row[1:]),
        "weights": mask,
        "mask": mask,
        "logprobs": torch.full((len(row) - 1,), SAMPLED_LOGP),
        "advantages": torch.zeros(len(row) - 1),
    }
    inputs = {name: tinker.TensorData.from_torch(tensor) for name, tensor in tensors.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


async def cookbook(client: tinker.SamplingClient, rows: list[list[int]]) -> dict[str, Any]:
    """The cookbook's evaluator, and its penalty of on-policy distillation with the server as the teacher."""
    data = [datum(row) for row in rows]
    evaluation = await SamplerNLLEvaluator(data)(client)
    penalty = await incorporate_kl_penalty(data, [client] * len(rows), [0] * len(rows), 1.0, 0.0)
    advantages = [each.loss_fn_inputs["advantages"].to_torch().tolist() for each in data]
    return {**evaluation, **penalty, "advantages": advantages}


def refusal(ask: Any) -> str:
    try:
        ask().result()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main(url: str, model: str, key: str, rows: list[list[int]]) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_sampling_client(base_model=model).result()
    prompts = [tinker.ModelInput.from_ints(row) for row in rows]
    futures = [client.compute_logprobs(prompt) for prompt in prompts]
    sampling = tinker.SamplingParams(max_tokens=8)
    print(
        json.dumps(
            {
                "logprobs": [future.result() for future in futures],
                "last": client.compute_logprobs(prompts[0], prompt_logprobs_last_n=2).result(),
                "models": [each.model_name for each in service.get_server_capabilities().supported_models],
                "sampling": refusal(lambda: client.sample(prompts[0], num_samples=1, sampling_params=sampling)),
                "training": refusal(lambda: service.create_lora_training_client(base_model=model)),
                "another": refusal(lambda: service.create_sampling_client(base_model="another")),
                **asyncio.run(cookbook(client, rows)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
