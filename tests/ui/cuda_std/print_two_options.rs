use cuda_std::println;

fn p(sum: f32) {
    println!("sum {sum:?:?}");
}

fn main() {}
