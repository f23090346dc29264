"""Placing a built pipeline: one owner of where it lives, and of undoing it.

moving     tensors anywhere in a value, moved to a device
weights    bringing a component's weights to where it runs, and sending them home
carrier    taking calls into a component to its device and their results back
placement  all of a pipeline's components placed by a plan; the handle that undoes it
placed     the pipeline's class, answering diffusers' questions from the placement
"""

from dmconfig.dispatch.placement import Placement as Placement
from dmconfig.dispatch.placement import dispatch as dispatch
