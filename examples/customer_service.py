"""
Customer service with scripted customers, who write again until they have been told what they need, or give up.

    python train.py --use_grpo --dataset examples/customers.jsonl --environment examples/customer_service.py:respond \
        --max_turns 4 --reward_functions environment --model_path Qwen/Qwen3-0.6B --learning_rate 1e-6

A row of the data has the prompt (what the agent knows, and the customer's first message), `topic`, `context` (what the
customer says when an answer was no help, one line after the other), and `needs`, the facts that settle the matter.
"""

import re

GREETINGS = ("hello", "hi ", "good morning", "good afternoon", "dear ")
LONGEST = 600                   # characters that a customer reads


def words(text):
    """Return the text in lower case, without its punctuation, between spaces."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def respond(conversation, topic, context, needs):
    """Return the next message of the customer, and points for the last one of the agent.

    +1 when the customer has been told all that is needed, with less for every turn it took; -0.3 when the customer gives
    up; -0.1 for a message that is empty, too long, says again what was said before, or copies what the agent knows beyond
    the matter. What such a copy tells does not count.
    """
    mine = [message["content"] for message in conversation if message["role"] == "assistant"]
    said, earlier = mine[-1], mine[:-1]
    known = ". ".join(message["content"] for message in conversation if message["role"] == "system").split(". ")
    beyond = [words(sentence) for sentence in known if not any(fact.lower() in sentence.lower() for fact in needs)]
    copies = [text for text in mine if any(sentence in words(text) for sentence in beyond if sentence.strip())]
    points = -0.1 if not said.strip() or len(said) > LONGEST or said in earlier or said in copies else 0.0
    if not earlier and said.lower().startswith(GREETINGS):
        points += 0.05
    told = " ".join(text for text in mine if text not in copies).lower()
    missing = [fact for fact in needs if fact.lower() not in told]
    if not missing:
        return None, points + 1.0 - 0.1 * len(earlier)
    follow_ups = context.splitlines()
    if len(earlier) >= len(follow_ups):
        return None, points - 0.3                         # nobody asks for ever
    if len(missing) < len(needs):
        return f"Thank you, but that is only half of it. {follow_ups[len(earlier)]}", points
    return f"{follow_ups[len(earlier)]} It is about {topic}.", points
