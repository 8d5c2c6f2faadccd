"""[fault_tolerance]: health probes, the API server, and the controller that heals through it."""

from pydantic import Field

from miles.config.section import Section


class FaultToleranceSection(Section):
    health_interval: float = Field(10.0, gt=0)
    """Seconds between two health probes of an engine."""
    health_timeout: float = Field(10.0, gt=0)
    """Seconds that one probe may take."""
    health_failures: int = Field(3, ge=1)
    """Failed probes in a row after which an engine counts as unhealthy."""
    control_timeout: float = Field(60.0, gt=0)
    """Seconds within which an engine must pause, resume or abort, and may be silent in a publish; past it, it is ended."""
    api_server_port: int = Field(0, ge=0, le=65535)
    """Port of the control API; 0 is off."""
    api_server_host: str = "127.0.0.1"
    """Address that the control API listens on."""
    api_server_token: str | None = None
    """Bearer token that the control API asks for; default: a random one, written to the run folder."""
    mini_ft_controller: bool = False
    """Suspend and resume unhealthy cells through the control API."""
    mini_ft_poll_interval: float = Field(5.0, gt=0)
    """Seconds between two looks of that controller."""
    mini_ft_resume_delay: float = Field(1.0, ge=0)
    """Seconds between suspending a cell and resuming it."""
    mini_ft_cooldown: float = Field(30.0, ge=0)
    """Seconds after a successful resume in which that cell is left alone."""
    mini_ft_max_failures: int = Field(5, ge=1)
    """Failed attempts in a row on one cell after which the controller gives up on it and says so."""
