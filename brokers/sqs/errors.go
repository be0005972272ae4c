package sqs

import (
	"context"
	"errors"
	"net"
	"strings"
	"time"

	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/twiceproof/twiceproof/brokers"
)

// retryPause is what a caller is asked to wait after a failure.
const retryPause = 500 * time.Millisecond

// code returns the error code that SQS answered with, in the one form that servers
// write differently: "AWS.SimpleQueueService.X", "com.amazonaws.sqs#X", "X".
func code(err error) string {
	var api smithy.APIError
	if !errors.As(err, &api) {
		return ""
	}
	return bare(api.ErrorCode())
}

func bare(c string) string {
	if i := strings.LastIndexByte(c, '#'); i >= 0 {
		c = c[i+1:]
	}
	c = strings.TrimPrefix(c, "AWS.SimpleQueueService.")
	if c == "NonExistentQueue" {
		return "QueueDoesNotExist"
	}
	return c
}

func status(err error) int {
	var re *smithyhttp.ResponseError
	if errors.As(err, &re) {
		return re.HTTPStatusCode()
	}
	return 0
}

// classify gives an error of a call its class.
func classify(op string, err error) error {
	if err == nil {
		return nil
	}
	var be *brokers.Error
	if errors.As(err, &be) {
		return err
	}
	e := &brokers.Error{Op: op, Err: err, After: retryPause}
	e.Class, e.Hint = classOf(code(err), status(err))
	if code(err) == "QueueDoesNotExist" {
		e.Err = errors.Join(brokers.ErrNoRoute, err)
	}
	if e.Class == brokers.Throttled {
		e.After = time.Second
	}
	return e
}

// classOf judges a code of a whole call or of one entry.
func classOf(c string, status int) (brokers.Class, string) {
	switch {
	case c == "QueueDoesNotExist":
		return brokers.Fatal, "create the queue, and check its name, the region and the account"
	case c == "OverLimit":
		return brokers.Throttled, "too many messages of the queue are in flight: settle them, or look for a consumer that received them and died"
	case c == "RequestThrottled", c == "ThrottlingException", c == "Throttling", c == "TooManyRequestsException", c == "KmsThrottled", status == 429:
		return brokers.Throttled, ""
	case strings.HasPrefix(c, "AccessDenied"):
		return brokers.Fatal, "the credentials lack a permission: sqs:ReceiveMessage, DeleteMessage, ChangeMessageVisibility, GetQueueUrl and GetQueueAttributes to consume, sqs:SendMessage and GetQueueUrl to publish"
	case c == "InvalidClientTokenId", c == "UnrecognizedClientException", c == "SignatureDoesNotMatch", c == "InvalidSecurity",
		c == "MissingAuthenticationToken", c == "IncompleteSignature", c == "ExpiredToken", c == "ExpiredTokenException":
		return brokers.Fatal, "check the credentials, the region and the clock"
	case strings.HasPrefix(c, "Kms"):
		return brokers.Fatal, "the queue is encrypted: the credentials need kms:Decrypt and kms:GenerateDataKey on its key"
	case c == "UnsupportedOperation", c == "InvalidAddress":
		return brokers.Fatal, ""
	case c == "InvalidMessageContents", c == "InvalidParameterValue", c == "MissingParameter", c == "InvalidAttributeName", c == "InvalidAttributeValue":
		return brokers.Permanent, ""
	}
	return brokers.Retryable, ""
}

// isLost tells the codes of a receipt handle that is no longer the message's newest, or
// whose message is visible or gone.
func isLost(c string) bool {
	return c == "ReceiptHandleIsInvalid" || c == "MessageNotInflight" || c == "InvalidParameterValue" || c == "InvalidIdFormat"
}

// neverSent tells an error by which nothing left this process.
func neverSent(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return true
	}
	var dns *net.DNSError
	return errors.As(err, &dns)
}

// causeOf prefers the reason that ctx ended with to what the client made of it.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && err != nil {
		return errors.Join(cause, err)
	}
	return err
}
