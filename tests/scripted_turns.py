"""Conversations whose turns of the policy are given."""


def run_scripted_turns(conversation, turns):
    """Run a conversation with given turns of the policy. Return the messages and the total points."""
    total, turns = 0.0, turns[: conversation.config.max_turns]
    for number, text in enumerate(turns, start=1):
        message, points = conversation.environment_step(text)
        total += points
        if message is None or number == len(turns):
            break
        conversation.messages.append(message)
    return conversation.messages[conversation.num_prompt_messages :], total + conversation.final_reward()
