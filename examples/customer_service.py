"""
Customer service with scripted customers, who write again until they have been told what they need, or give up.

    python train.py --use_grpo --dataset examples/customers.jsonl --environment examples/customer_service.py:respond \
        --max_turns 4 --reward_functions environment --model_path Qwen/Qwen3-0.6B --learning_rate 1e-6

A row of the data has the prompt (instructions with what the agent knows, and the customer's first message),
`topic`, `context` (a follow-up message in each line, sent in order while facts are missing), and `needs`, the
facts to tell.
"""

import re

GREETINGS = ("hello", "hi ", "good morning", "good afternoon", "dear ")
LONGEST = 600                   # characters of a message


def words(text):
    """Return the text in lower case, without its punctuation, between spaces."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def respond(conversation, topic, context, needs):
    """Return the customer's next message, or None at the end; and the reward of the agent's last message.

    The reward is the sum of

        1 - 0.1 * number of earlier messages    when all facts in `needs` are told, which ends the conversation
        -0.3    when a fact is missing and the customer, who has no follow-up message left, gives up
        -0.1    for a message that is empty, longer than LONGEST, equal to an earlier one, or a copy (it repeats
                a sentence of the instructions without a needed fact); facts in copies do not count
        0.05    for a greeting at the start of the first message
    """
    mine = [message["content"] for message in conversation if message["role"] == "assistant"]
    said, earlier = mine[-1], mine[:-1]
    known = ". ".join(message["content"] for message in conversation if message["role"] == "system").split(". ")
    beyond = [words(sentence) for sentence in known if not any(fact.lower() in sentence.lower() for fact in needs)]
    copies = [text for text in mine if any(sentence in words(text) for sentence in beyond if sentence.strip())]
    reward = -0.1 if not said.strip() or len(said) > LONGEST or said in earlier or said in copies else 0.0
    if not earlier and said.lower().startswith(GREETINGS):
        reward += 0.05
    told = " ".join(text for text in mine if text not in copies).lower()
    missing = [fact for fact in needs if fact.lower() not in told]
    if not missing:
        return None, reward + 1.0 - 0.1 * len(earlier)
    follow_ups = context.splitlines()
    if len(earlier) >= len(follow_ups):
        return None, reward - 0.3                         # out of follow-up messages
    if len(missing) < len(needs):
        return f"Thank you, but that is only half of it. {follow_ups[len(earlier)]}", reward
    return f"{follow_ups[len(earlier)]} It is about {topic}.", reward
