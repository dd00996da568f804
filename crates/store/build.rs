//! Migrations are compiled into the program, so a changed one must trigger a rebuild.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
