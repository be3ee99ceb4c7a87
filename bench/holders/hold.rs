//! Holds a file in blocks of Rust's allocator; see README.md.

use std::fs::File;
use std::io::{self, Read, Write};

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let size: usize = args[2].parse().expect("a number");
    let mut file = File::open(&args[1])?;
    let mut blocks = Vec::new();
    loop {
        let mut block = vec![0; size];
        if file.read_exact(&mut block).is_err() {
            break;
        }
        blocks.push(block);
    }
    println!("ready");
    io::stdout().flush()?;
    if io::stdin().read_line(&mut String::new())? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut file = File::open(&args[1])?;
    let mut expected = vec![0; size];
    let right = !blocks.is_empty()
        && blocks.iter().all(|block| file.read_exact(&mut expected).is_ok() && *block == expected);
    println!("{}", if right { "right" } else { "wrong" });
    Ok(())
}
