use cuda_std::println;

fn p() {
    println!("{:x}", 1);
}

fn main() {}
