// Holds a file in blocks of Go's heap; see README.md.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
)

func main() {
	size, _ := strconv.Atoi(os.Args[2])
	file, err := os.Open(os.Args[1])
	if err != nil {
		panic(err)
	}
	var blocks [][]byte
	for {
		block := make([]byte, size)
		if _, err := io.ReadFull(file, block); err != nil {
			break
		}
		blocks = append(blocks, block)
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		os.Exit(1)
	}
	file.Seek(0, io.SeekStart)
	right, expected := len(blocks) > 0, make([]byte, size)
	for _, block := range blocks {
		_, err := io.ReadFull(file, expected)
		right = right && err == nil && bytes.Equal(block, expected)
	}
	if right {
		fmt.Println("right")
	} else {
		fmt.Println("wrong")
	}
}
