"""Programs of users of other packages: `embedding_clients.py NAME URL` embeds two texts by the package, and prints the vectors as JSON.

`test_embedding_clients.py` runs each in a venv of its own; it imports nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TEXTS = ["ROMEO:", "JULIET: my love"]


def langchain(url: str) -> Any:
    from langchain_openai import OpenAIEmbeddings

    # otherwise it sends the ids of OpenAI's own tokenizer
    client = OpenAIEmbeddings(model="demo", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    assert len(client.embed_query(TEXTS[0])) == len(client.embed_documents(TEXTS)[0])
    return client.embed_documents(TEXTS)


def litellm(url: str) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    ranked = litellm.rerank(model="hosted_vllm/demo", query=TEXTS[0], documents=TEXTS, top_n=1, api_base=url, api_key="none")
    assert ranked.results[0]["index"] == 0
    made = litellm.embedding(model="openai/demo", input=TEXTS, api_base=f"{url}/v1", api_key="none", encoding_format="float")
    assert made.usage.prompt_tokens > 0
    return [one["embedding"] for one in made.data]


def llama_index(url: str) -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    return OpenAILikeEmbedding(model_name="demo", api_base=f"{url}/v1", api_key="none").get_text_embedding_batch(TEXTS)


def haystack(url: str) -> Any:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    embedder = OpenAIDocumentEmbedder(model="demo", api_base_url=f"{url}/v1", api_key=Secret.from_token("none"), progress_bar=False)
    return [document.embedding for document in embedder.run([Document(content=text) for text in TEXTS])["documents"]]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
