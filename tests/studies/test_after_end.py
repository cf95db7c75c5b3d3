"""Long rollouts up to their end token: what counts, and the loss of it, compared with plain loops."""

import after_end
import torch
from torch.nn import functional as F

END = 7


def test_a_rollout_counts_up_to_its_first_end_token():
    tokens = torch.tensor([[[1, END, 2, END], [1, 2, 3, 4], [END, END, 1, 1], [1, 2, 3, END]]])
    assert after_end.tokens_to_end(tokens, END).tolist() == [[2, 4, 1, 4]]


def test_losses_are_those_of_plain_loops():
    """Two documents, three rollouts of four tokens, six features; one rollout ends at once, and one never."""
    torch.manual_seed(0)
    tokens = torch.tensor(
        [[[1, END, 2, 3], [1, 2, 3, 4], [END, 1, 2, 3]], [[1, 2, END, 4], [1, 1, 1, 1], [2, 2, 2, 2]]]
    )
    features, reference = torch.randn(2, 3, 4, 6), torch.randn(2, 4, 6)
    found = after_end.losses(tokens, features, reference, END, [2, 4])
    assert torch.allclose(found["ended"], torch.tensor([[2 / 3, 2 / 3], [0.0, 1 / 3]]))
    kept = [[2, 4, 1], [3, 4, 4]]
    for column, length in enumerate((2, 4)):
        for document in range(2):
            expected = F.normalize(reference[document, :length].mean(0), dim=-1)
            for name, counts in (("cfm_loss", [length] * 3), ("cfm_loss_to_end", kept[document])):
                phi = [
                    F.normalize(features[document, n, : min(count, length)].mean(0), dim=-1)
                    for n, count in enumerate(counts)
                ]
                pairs = sum((phi[i] @ phi[j]).item() for i in range(3) for j in range(3) if i != j) / 6
                cross = sum((one @ expected).item() for one in phi) / 3
                assert abs(found[name][document, column].item() - (1 - 2 * cross + pairs)) < 1e-5, (name, length)
    assert not torch.allclose(found["cfm_loss"], found["cfm_loss_to_end"])
