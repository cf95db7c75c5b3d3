"""Chats: `{messages}` -> `{input_ids, labels, prompt_length, turn_spans}`, with every assistant turn as labels.

Keys of the dataset select other turns and ends of turns. Another name of `ebft_strided_chat.transform`.
"""

from ebft.data.transforms.ebft_strided_chat import transform

__all__ = ["transform"]
