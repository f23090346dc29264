"""Placing a built pipeline: one owner of where it lives, and of undoing it.

moving     tensors anywhere in a value, moved to a device
homes      tensors away from home, and their way back
layers     weights that come layer by layer
weights    bringing a component's weights to where it runs, and sending them home
split      a component whose parts are on several devices
casting    what enters a component, in its dtype
carrier    taking calls into a component to its device and their results back
placement  all of a pipeline's components placed by a plan; the handle that undoes it
placed     the pipeline's class, answering diffusers' questions from the placement
audit      what is true of a placed pipeline, held against its plan
life       a component swapped, a second pipeline on the same parts, the end
"""

from dmconfig.dispatch.life import derive, execution_device_of, swap, unload
from dmconfig.dispatch.placement import Placement, dispatch, placement_of

__all__ = ["Placement", "derive", "dispatch", "execution_device_of", "placement_of", "swap", "unload"]
