// Package compat holds the tests that other migration tools apply the embedded SQL.
// It is a module of its own, so that these tools reach no user's build.
//
//	cd migrations/compat && go run ../../cmd/devenv -only postgres -- go test ./...
package compat
