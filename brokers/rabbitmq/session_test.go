package rabbitmq

import (
	"slices"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
)

// The contexts of a subscription end one after the other. If that of a key's first
// message ended before that of its second, a consumer could drop the first and
// start the second in between, and on a queue with a single active consumer the
// first would come again behind it.
func TestContextsOfLaterMessagesEndFirst(t *testing.T) {
	t.Parallel()
	ss := &session{s: &Source{}, open: map[uint64]*held{}, ended: make(chan struct{})}
	var ended []uint64
	for tag := uint64(1); tag <= 100; tag++ {
		ss.open[tag] = &held{sess: ss, tag: tag, cancel: func(error) { ended = append(ended, tag) }}
	}
	ss.end(amqp.ErrClosed)
	slices.Reverse(ended)
	assert.Len(t, ended, 100)
	assert.True(t, slices.IsSorted(ended), "%v", ended)
}
