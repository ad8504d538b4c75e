"""Stand-ins drawn by this project: hand radiographs and faces in the real sets' names and layouts.

They let everything run without a download, and they are not the real thing: whatever is made from them says
"synthetic".
"""

from gramgn.data.synthetic._face import Person, draw_face, make_person
from gramgn.data.synthetic._hand import draw_hand
from gramgn.data.synthetic._stand_ins import AFADSynthetic, RSNASynthetic

__all__ = ["AFADSynthetic", "Person", "RSNASynthetic", "draw_face", "draw_hand", "make_person"]
