-- | Holds a file in byte strings; see README.md.
import qualified Data.ByteString as B
import System.Environment (getArgs)
import System.Exit (exitFailure)
import System.IO

main :: IO ()
main = do
  [path, size] <- getArgs
  let blocks = withBinaryFile path ReadMode (more (read size))
      more n file = do
        block <- B.hGet file n
        if B.length block == n then (block :) <$> more n file else pure []
  held <- blocks
  hSetBuffering stdout LineBuffering
  putStrLn (if null held then "empty" else "ready")
  end <- isEOF
  if end then exitFailure else pure ()
  _ <- getLine
  again <- blocks
  putStrLn (if held == again then "right" else "wrong")
