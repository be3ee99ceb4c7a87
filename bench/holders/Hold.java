import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;

/** Holds a file in arrays of Java's heap; see README.md. */
public class Hold {
    public static void main(String[] args) throws Exception {
        int size = Integer.parseInt(args[1]);
        ArrayList<byte[]> blocks = new ArrayList<>();
        try (InputStream file = new FileInputStream(args[0])) {
            for (byte[] block; (block = file.readNBytes(size)).length == size; ) blocks.add(block);
        }
        System.out.println("ready");
        System.out.flush();
        if (new BufferedReader(new InputStreamReader(System.in)).readLine() == null) System.exit(1);
        boolean right = !blocks.isEmpty();
        byte[] expected = new byte[size];
        try (InputStream file = new FileInputStream(args[0])) {
            for (byte[] block : blocks) right &= file.readNBytes(expected, 0, size) == size && Arrays.equals(block, expected);
        }
        System.out.println(right ? "right" : "wrong");
    }
}
