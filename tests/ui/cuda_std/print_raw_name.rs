use cuda_std::println;

fn p(r#type: u32) {
    println!("{r#type}");
}

fn main() {}
