"""Our own small engine: continuous batching over any Hugging Face full-attention causal LM, on CPU or GPU.

sequence.py     one request and what became of it so far
scheduler.py    who has a slot, what the next forward pass computes, waves
cache.py        keys and values by slot
attention.py    attention of a packed batch over the slots
model.py        loads the model; its forward pass as transformers makes it
llama.py        the same, written out for Llama-shaped models
fitting.py      chooses the forward pass and proves it
graphs.py       decode steps as CUDA graphs
sampling.py     logits and seeds into tokens and log-probs
stopping.py     when a sequence is done
decoder.py      one step: schedule, forward, sample, retire
requests.py     refuses what can never work
core.py         requests, pauses and publishes around the decoder: what the serving thread does
serving.py      the serving thread
engine.py       the asynchronous face of all this
"""
