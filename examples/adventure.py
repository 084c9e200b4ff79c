"""
A text adventure in two rooms: a key, hidden in one of six places, opens the door of the hall.

    python train.py examples/adventure.json

The hiding place is the same within a group: in reset, `random` is seeded equally for all completions of a
prompt. Rows of the data word the same task differently; a column `hidden` would fix the hiding place. A policy
learns to search, to remember where it has searched, and to come back.
"""

import random

ROOMS = {"hall": ("rug", "vase", "coat"), "cellar": ("barrel", "shelf", "sack")}


class Adventure:
    """Reward 0.3 for finding the key, 0.7 for opening the door, -0.02 for searching a place again."""

    def reset(self, hidden=None, **columns):
        """Hide the key, and describe the hall."""
        self.hidden = hidden or random.choice([place for places in ROOMS.values() for place in places])
        self.room, self.searched, self.reward = "hall", set(), 0.0
        self.has_key = self.is_open = False
        return "\n" + self._look()

    def go(self, room: str) -> str:
        """
        Go to the other room.

        Args:
            room: hall or cellar.
        """
        if room not in ROOMS:
            raise ValueError(f"there is no {room}, only hall and cellar")
        self.room = room
        return self._look()

    def search(self, place: str) -> str:
        """
        Search a place in this room for the key.

        Args:
            place: One of the places that you see here.
        """
        if place not in ROOMS[self.room]:
            raise ValueError(f"there is no {place} in the {self.room}")
        self.reward -= 0.02 * (place in self.searched)
        self.searched.add(place)
        if place != self.hidden or self.has_key:
            return "Nothing."
        self.has_key = True
        self.reward += 0.3
        return "You have the key."

    def unlock(self) -> str:
        """Unlock the door of the hall with the key."""
        if self.room != "hall" or not self.has_key:
            raise ValueError("you have no key" if self.room == "hall" else "the door is in the hall")
        self.reward += 0.7 * (not self.is_open)
        self.is_open = True
        return "The door is open. You have won."

    def _look(self):
        door = " The door is locked." if self.room == "hall" else ""
        return f"You are in the {self.room}, with {', '.join(ROOMS[self.room])}.{door}"
