package devenv_test

import (
	"errors"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func TestSQSStartsKillsAndStartsAgainOnTheSamePort(t *testing.T) {
	s := devtest.OwnSQS(t)
	c := sqs.New(sqs.Options{BaseEndpoint: aws.String(s.URL()), Region: "eu-central-1", Credentials: aws.AnonymousCredentials{}})
	created, err := c.CreateQueue(t.Context(), &sqs.CreateQueueInput{QueueName: aws.String("q")})
	require.NoError(t, err)
	get := &sqs.GetQueueAttributesInput{QueueUrl: created.QueueUrl, AttributeNames: []types.QueueAttributeName{"All"}}
	_, err = c.GetQueueAttributes(t.Context(), get)
	require.NoError(t, err)

	pid, url := s.PID(), s.URL()
	require.NoError(t, s.Kill())
	require.Zero(t, s.PID())
	require.NoError(t, s.Start(t.Context()))
	require.NotEqual(t, pid, s.PID())
	require.Equal(t, url, s.URL())
	_, err = c.GetQueueAttributes(t.Context(), get)
	var gone *types.QueueDoesNotExist
	require.True(t, errors.As(err, &gone), "a killed server forgets its queues: %v", err)
	require.NoError(t, s.Stop())
}
