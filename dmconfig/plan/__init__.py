"""Where every component's weights rest and where it runs: decided before a weight is read, without torch.

``planner.make_plan`` is the way in; ``model`` has the values it returns, ``placement`` the search behind
``balanced``, ``requests`` what the file asks for each component.
"""

from dmconfig.plan.model import Assignment as Assignment
from dmconfig.plan.model import DeviceUse as DeviceUse
from dmconfig.plan.model import Part as Part
from dmconfig.plan.model import Plan as Plan
from dmconfig.plan.model import Residency as Residency
from dmconfig.plan.planner import make_plan as make_plan
