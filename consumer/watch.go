package consumer

import (
	"fmt"
	"time"
)

// watch turns health red when there are messages in hand and none of them comes to
// an end: a message that waits for ever, or one that got lost in this process. It
// goes by what is finished, not by the absence of errors.
func (l *loop[Tx]) watch() {
	if l.cfg.HandlerTimeout < 0 {
		return // a handler may take as long as it likes
	}
	limit := 2*l.cfg.HandlerTimeout + l.cfg.ClaimTimeout
	n := l.room.inHand()
	idle := time.Since(time.Unix(0, l.progress.Load()))
	if n > 0 && idle > limit && l.gate.isOpen() {
		l.st.report("stalled", fmt.Errorf("%d messages are in hand and none was finished for %s: look for a claim that another transaction holds, then restart this consumer", n, idle.Round(time.Second)))
		return
	}
	l.st.report("stalled", nil)
}
