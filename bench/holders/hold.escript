#!/usr/bin/env escript
%% Holds a file in binaries; see README.md.
main([Path, Word]) ->
    Size = list_to_integer(Word),
    Held = blocks(Path, Size),
    io:format("ready~n"),
    case io:get_line("") of eof -> halt(1); _ -> ok end,
    Right = Held =/= [] andalso Held =:= blocks(Path, Size),
    io:format(if Right -> "right~n"; true -> "wrong~n" end).

blocks(Path, Size) ->
    {ok, File} = file:open(Path, [read, binary, raw]),
    Blocks = blocks_of(File, Size),
    ok = file:close(File),
    Blocks.

blocks_of(File, Size) ->
    case file:read(File, Size) of
        {ok, Block} when byte_size(Block) =:= Size -> [Block | blocks_of(File, Size)];
        _ -> []
    end.
